"""A fleet in simulated time: the router's real decisions, workers that only count tokens and remember pages.

P computes one prompt after the other, and tells its speed; D streams any number side by side. P looks into its cache when it
begins, and fetches from D what only that has; caches forget the least recently used pages.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import inf
from random import Random
from typing import Any, cast

from jdisagg.core.fleet import Load, Member, ModelCard
from jdisagg.core.requests import EngineRequest, Output, Provenance, Role, SamplingParams
from jdisagg.roles.speed_seen import SpeedSeen
from jdisagg.router.entry import Entry, RunStream
from jdisagg.router.fleet import Fleet
from jdisagg.router.flight import Flight
from jdisagg.router.placement import Placement

PAGE_TOKENS = 16
STEP_TOKENS = 512
STEP_S, COMPUTED_PER_S, MOVED_PER_S = 0.004, 12_000.0, 120_000.0  # of a prompt; tokens
TOKEN_S = 0.02  # of an answer
HEARTBEAT_S = 0.25

Tokens = tuple[int, ...]
Then = Callable[[Tokens], None]  # gets prompt and answer


def pages_of(tokens: Tokens) -> list[int]:
    """A key for each full page, of everything up to its end."""
    keys, parent = list[int](), 0
    for end in range(PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
        parent = hash((parent, tokens[end - PAGE_TOKENS : end]))
        keys.append(parent)
    return keys


class Cache:
    """The pages of one worker."""

    def __init__(self, num_tokens: float) -> None:
        self._most = num_tokens // PAGE_TOKENS
        self._keys: OrderedDict[int, None] = OrderedDict()

    def match(self, keys: list[int], num_tokens: int) -> int:
        """Leading tokens that are here; the last one of a prompt is computed in any case."""
        most = (num_tokens - 1) // PAGE_TOKENS
        return next((i for i, key in enumerate(keys[:most]) if key not in self._keys), most) * PAGE_TOKENS

    def use(self, keys: list[int]) -> None:
        """They are here now, and the latest."""
        for key in reversed(keys):
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)


@dataclass(eq=False)
class Job:
    """A request on its way, and what became of it."""

    prompt: Tokens
    num_out: int
    then: Then | None
    arrived_s: float
    keys: list[int]
    flight: Flight
    cached: int = 0
    here: int = 0  # of these, on P itself
    held: int = 0
    ideal: int = 0  # cached, had all prompts so far gone through one cache without end
    wait_s: float = 0.0  # until P began
    ttft_s: float = 0.0


@dataclass(eq=False)
class Worker:
    """P or D."""

    entry: Entry
    cache: Cache
    slow: float = 1.0  # P: times as slow as others
    seen: SpeedSeen = field(default_factory=lambda: SpeedSeen(STEP_TOKENS))  # of P
    queue: deque[Job] = field(default_factory=deque[Job])
    computing: Job | None = None
    busy_s: float = 0.0


class Simulation:
    """Events in order of time; `done` are the requests that have ended."""

    def __init__(self, num_prefill: int, num_decode: int, cache_tokens: int, *, slow: float = 1.0) -> None:
        """`slow`: how many times as long the first P takes as the others."""
        self.now_s, self.done = 0.0, list[Job]()
        self.fleet = Fleet(dead_after_s=inf)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._everything = Cache(inf)
        for role, num in ((Role.PREFILL, num_prefill), (Role.DECODE, num_decode)):
            for number in range(num):
                self.fleet.register(_member(role, number, cache_tokens), 0.0)
        for entry in self.fleet.entries():
            entry.stream = RunStream(0.0, steady_s=0.0)
        self.workers = {e.member.address: Worker(e, Cache(cache_tokens)) for e in self.fleet.entries()}
        self.workers["prefill-0"].slow = slow
        self._placement = Placement(cast(Any, self))  # for it this is `Workers`

    def submit(self, *_: object) -> None:
        """`arrive` sees where a request was placed."""

    def cancel(self, *_: object, **__: object) -> None:
        """Nothing is cancelled: all have ended."""

    def at(self, when_s: float, do: Callable[[], None]) -> None:
        """Do it then."""
        heapq.heappush(self._events, (when_s, next(self._numbers), do))

    def run(self) -> None:
        """Until nothing more happens."""
        self.at(HEARTBEAT_S, self._beat)
        while self._events:
            self.now_s, _, do = heapq.heappop(self._events)
            do()

    def arrive(self, prompt: Tokens, num_out: int, then: Then | None = None) -> None:
        """A request, now."""
        sampling = SamplingParams(max_tokens=num_out)
        name = f"r{next(self._numbers)}"
        flight = Flight(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, deadline_s=inf))
        self._placement.begin(flight)
        assert self._placement.place(flight, self.now_s)
        assert flight.prefill is not None
        job = Job(prompt, num_out, then, self.now_s, pages_of(prompt), flight)
        job.ideal = self._everything.match(job.keys, len(prompt))
        self._everything.use(job.keys)
        prefill = self.workers[flight.prefill.entry.member.address]
        prefill.queue.append(job)
        self._compute(prefill)

    def _compute(self, prefill: Worker) -> None:
        if prefill.computing is not None or not prefill.queue:
            return
        job = prefill.computing = prefill.queue.popleft()
        here = job.here = prefill.cache.match(job.keys, len(job.prompt))
        job.held = self._decode_of(job).cache.match(job.keys, len(job.prompt))
        job.cached, job.wait_s = max(here, job.held), self.now_s - job.arrived_s
        computed_s = prefill.slow * (STEP_S + (len(job.prompt) - job.cached) / COMPUTED_PER_S)
        took_s = computed_s + (job.cached - here) / MOVED_PER_S
        prefill.busy_s += took_s
        self.at(self.now_s + took_s, lambda: self._hand_over(prefill, job, computed_s))

    def _hand_over(self, prefill: Worker, job: Job, computed_s: float) -> None:
        prefill.computing = None
        prefill.cache.use(job.keys)
        job.ttft_s = self.now_s - job.arrived_s
        worker = prefill.entry.member.worker
        num_computed, num_borrowed = len(job.prompt) - job.cached, job.cached - job.here
        for start in range(0, num_computed, STEP_TOKENS):
            num_tokens = min(STEP_TOKENS, num_computed - start)
            prefill.seen.add(num_tokens, computed_s * num_tokens / num_computed, self.now_s)
        provenance = Provenance(prefill_worker=worker, prefilled_tokens=num_computed, borrowed_tokens=num_borrowed)
        first = Output(request_id=job.flight.request.request_id, token_ids=(1,), provenance=provenance)
        self._placement.heard(job.flight, first)
        streamed_s = (len(job.prompt) - job.held) / MOVED_PER_S + job.num_out * TOKEN_S
        self.at(self.now_s + streamed_s, lambda: self._end(job))
        self._compute(prefill)

    def _end(self, job: Job) -> None:
        answer = tuple(Random(hash(job.prompt)).choices(range(1000, 30_000), k=job.num_out))
        self._decode_of(job).cache.use(pages_of(job.prompt + answer[:-1]))
        self._placement.leave(job.flight)
        self.done.append(job)
        if job.then is not None:
            job.then(job.prompt + answer)

    def _decode_of(self, job: Job) -> Worker:
        assert job.flight.entry is not None
        return self.workers[job.flight.entry.member.address]

    def _beat(self) -> None:
        for worker in self.workers.values():
            num_waiting = sum(len(job.prompt) for job in worker.queue)
            load = Load(
                running=worker.entry.pending,
                free_pages=1,
                total_pages=1,
                pending_prefill_tokens=num_waiting,
                speed=worker.seen.told(self.now_s),
            )
            self.fleet.tell_load(worker.entry, load)
        if self._events:
            self.at(self.now_s + HEARTBEAT_S, self._beat)


def _member(role: Role, number: int, cache_tokens: int) -> Member:
    return Member(
        role=role,
        address=f"{role.value}-{number}",
        worker=f"{role.value}-{number}",
        epoch="one",
        card=ModelCard(name="demo", max_model_len=1_000_000, vocab_size=1_000_000, fingerprint="weights"),
        cache_tokens=cache_tokens,
    )
