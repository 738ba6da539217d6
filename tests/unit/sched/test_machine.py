"""Arbitrary histories of a worker: whatever comes, in whatever order, invariants hold and every stream is right.

After every rule: pages and slots balance, statuses went along the table, the strict device found nothing wrong, and what each
client has seen is a prefix of what the model's definition gives. At the end everything is served, nothing is left, and the
schedule log replays to the same plans.

    JDISAGG_MACHINE_RULES=1000000 JDISAGG_MACHINE_SEED=1000 pytest -s tests/unit/sched/test_machine.py
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from jdisagg.core.errors import HandoffLost, InvalidRequest
from jdisagg.core.requests import EngineRequest, FinishReason, Output, Role
from jdisagg.replay import replay
from jdisagg.sched.plan import PageTable
from jdisagg.sched.states import Status
from tests.unit.sched.engine_fake import FakeEngine, expected, next_token, request

RULES = int(os.environ.get("JDISAGG_MACHINE_RULES", "20000"))  # of the three machines together
SEED = int(os.environ.get("JDISAGG_MACHINE_SEED", "1000"))
ROUND = settings(max_examples=max(1, min(50, RULES // 120)), stateful_step_count=50, derandomize=False, database=None)
MIN_RULES_PER_S = 40  # on a machine that does other things too
MAX_IN_FLIGHT = 2
PROMPTS = st.one_of(
    st.lists(st.integers(0, 30), min_size=1, max_size=14).map(tuple),
    st.integers(1, 20).map(lambda n: tuple(range(1, n + 1))),  # share prefixes
)


@dataclass
class Fetch:
    """A hand-off as its peer sees it."""

    tokens: tuple[int, ...]
    page_table: PageTable | None = None
    held_tokens: int = 0
    has_first: bool = False


class WorkerMachine(RuleBasedStateMachine):
    """One worker of `role`, its clients and its peers."""

    role = Role.UNIFIED
    num_rules = 0  # of all histories of this class

    @initialize(
        num_pages=st.integers(8, 20),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 12),
        threshold=st.sampled_from([0, 3]),
        reserve=st.sampled_from([0, 5]),
        policy=st.sampled_from(["fcfs", "priority", "prefill-first"]),
        steps=st.sampled_from([1, 1, 3]),
        host_tokens=st.sampled_from([0, 12, 100]),
        max_bypass=st.sampled_from([0, 1, 16]),
        safety_margin=st.sampled_from([0.0, 0.0, 0.3]),
        max_num_kv_read_tokens=st.sampled_from([0, 0, 50]),
        caching=st.booleans(),
        local_prefill=st.booleans(),
    )
    def start(
        self, *, num_pages: int, budget: int, threshold: int, reserve: int, policy: str, steps: int, **options: Any
    ) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.log = Path(self.directory.name) / "schedule.jsonl"
        self.engine = FakeEngine(
            self.role,
            num_pages=num_pages,
            max_model_len=40,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            reserved_decode_tokens=reserve,
            scheduling_policy=policy,
            num_scheduler_steps=steps,
            schedule_log=str(self.log),
            **options,
        )
        self.requests: dict[str, EngineRequest] = {}
        self.fetches: dict[str, Fetch] = {}
        self.silent: set[str] = set()  # cancelled or released

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 14),
        ignore_eos=st.booleans(),
        num_resumed=st.integers(0, 3),
        priority=st.integers(0, 2),
        deadline_s=st.sampled_from([1e9, 1e9, 5.0]),
        remote=st.booleans(),
        is_open=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        logprobs=st.sampled_from([None, None, 0]),
    )
    def add(
        self,
        *,
        prompt: tuple[int, ...],
        max_tokens: int,
        num_resumed: int,
        remote: bool,
        is_open: bool,
        deadline_s: float,
        **rest: Any,
    ) -> None:
        name = f"r{len(self.requests)}"
        resumed = tuple(expected(prompt, min(num_resumed, max_tokens - 1), ignore_eos=rest["ignore_eos"]))
        new = request(name, prompt, max_tokens, generated=resumed, deadline_s=self.engine.now_s + deadline_s, **rest)
        remote = remote and self.role is Role.DECODE
        try:
            self.engine.add(new, remote=remote, is_open=is_open)
        except InvalidRequest:
            return
        self.requests[name] = new
        if (
            remote
            and not self.engine.scheduler.awaits_sibling(name)
            and any(s["request_id"] == name for s in self.engine.scheduler.snapshot()["sequences"])
        ):
            self.fetches[name] = Fetch(new.token_ids, held_tokens=self.engine.scheduler.held_tokens(name))

    @rule(prompt=PROMPTS, n=st.integers(2, 4), max_tokens=st.integers(1, 9), remote=st.booleans())
    def add_choices(self, prompt: tuple[int, ...], n: int, max_tokens: int, remote: bool) -> None:
        """Choices of one request: they may share its prompt's KV, and get what they would get alone."""
        options = {"ignore_eos": True, "priority": 0, "prompt_logprobs": None, "fork_group": f"g{len(self.requests)}"}
        for _ in range(n):
            self.add(
                prompt=prompt, max_tokens=max_tokens, num_resumed=0, remote=remote, is_open=True, deadline_s=1e9, **options
            )

    @precondition(lambda self: len(self.engine.in_flight) < MAX_IN_FLIGHT)
    @rule()
    def step(self) -> None:
        self.engine.step()
        for reserved in self.engine.scheduler.take_reserved():
            fetch = self.fetches[reserved.request_id]
            assert (reserved.num_tokens, reserved.held_tokens) == (len(fetch.tokens), fetch.held_tokens)
            fetch.page_table = reserved.page_table
        for again in self.engine.scheduler.take_retracted():
            self.fetches[again.request_id] = Fetch(again.token_ids)

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def commit(self) -> None:
        self.engine.commit_one()

    @precondition(lambda self: self.fetches)
    @rule(data=st.data())
    def first_token_arrives(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.fetches)))
        fetch = self.fetches[name]
        asked = self.requests[name]
        token = next_token(fetch.tokens)
        finish = None
        if not fetch.has_first:
            count = len(fetch.tokens) - len(asked.prompt_token_ids) + 1
            if token == 0 and not asked.sampling.ignore_eos:
                finish = FinishReason.STOP
            elif count == asked.sampling.max_tokens:
                finish = FinishReason.LENGTH
        first = Output(request_id=name, token_ids=(token,), finish=finish)
        output = self.engine.scheduler.remote_first_token(name, first, self.engine.now_s)
        assert output.token_ids == (() if fetch.has_first else (token,))
        self.engine.collect([output])
        fetch.has_first = True
        if finish is not None:
            del self.fetches[name]

    @precondition(lambda self: self._can_complete())
    @rule(data=st.data())
    def kv_arrives(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self._can_complete()))
        fetch = self.fetches.pop(name)
        assert fetch.page_table is not None
        self.engine.device.import_tokens(fetch.page_table, fetch.tokens, fetch.held_tokens, len(fetch.tokens))
        self.engine.scheduler.kv_arrived(name, self.engine.now_s)

    @precondition(lambda self: self.fetches)
    @rule(data=st.data(), fails=st.booleans())
    def peer_dies(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.fetches)))
        fetch = self.fetches.pop(name)
        if not fails:
            held = fetch.held_tokens
            if fetch.page_table is not None:
                held = data.draw(st.integers(held, len(fetch.tokens)))
                self.engine.device.import_tokens(fetch.page_table, fetch.tokens, fetch.held_tokens, held)
            assert self.engine.scheduler.compute_locally(name, held)
            return
        output = self.engine.scheduler.fail(name, HandoffLost("lost"))
        assert output is not None
        self.engine.collect([output])

    @precondition(lambda self: self.fetches)
    @rule(data=st.data())
    def peer_shakes_hands(self, data: st.DataObject) -> None:
        self.engine.scheduler.peer_ready(data.draw(st.sampled_from(sorted(self.fetches))))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.fetches.pop(name, None)
        self.silent.add(name)
        (self.engine.scheduler.release if self.role is Role.PREFILL else self.engine.scheduler.cancel)(name)

    @precondition(lambda self: self._in_status(Status.PUBLISHING))
    @rule(data=st.data())
    def gives_way(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(self._in_status(Status.PUBLISHING)), min_size=1, unique=True))
        live = self.engine.scheduler.table.live
        can = [name for name in names if self.engine.seen[name].last.finish is None]
        parked = self.engine.scheduler.park(tuple(names))
        assert parked == max(can, key=lambda name: live[name].order, default=None)
        if parked is not None:
            del self.engine.seen[parked]  # its token comes again

    @precondition(lambda self: self._in_status(Status.PARKED))
    @rule(data=st.data())
    def receiver_has_memory(self, data: st.DataObject) -> None:
        self.engine.scheduler.unpark(data.draw(st.sampled_from(self._in_status(Status.PARKED))))

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.engine.now_s += seconds
        expired = self.engine.scheduler.expire(self.engine.now_s)
        self.engine.collect(expired)
        for output in expired:
            self.fetches.pop(output.request_id, None)

    @rule()
    def forget_prefixes(self) -> None:
        self.engine.scheduler.reset_prefix_cache()

    @invariant()
    def pages_and_slots_balance(self) -> None:
        if hasattr(self, "engine"):
            type(self).num_rules += 1
            self.engine.scheduler.check()
            assert self.engine.scheduler.counts()["running"] <= self.engine.config.max_num_seqs

    @invariant()
    def what_was_sent_is_right(self) -> None:
        for name, seen in self.engine.seen.items() if hasattr(self, "engine") else ():
            assert seen.tokens == self._whole(name)[: len(seen.tokens)]

    def teardown(self) -> None:
        """Peers answer, the rest is served; then the log is replayed."""
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if self.engine.scheduler.is_idle() and not self.engine.in_flight:
                break
            self._serve_once()
        self.engine.run(max_ticks=1)
        for name, asked in self.requests.items():
            self._check_end(name, asked)
        self.engine.scheduler.close_log()
        with self.log.open(encoding="utf-8") as lines:
            report = replay(lines)
        self.directory.cleanup()
        assert report.difference is None
        assert report.num_plans >= len(self.engine.plans)

    def _serve_once(self) -> None:
        for name in list(self.fetches):
            self.engine.scheduler.peer_ready(name)
        if len(self.engine.in_flight) < MAX_IN_FLIGHT:
            self.step()
        self.commit_oldest_or_nothing()
        for name in self._can_complete(first=False):
            data = _Fixed(name)
            self.first_token_arrives(data)
            if name in self.fetches:
                self.kv_arrives(data)
        for name in self._in_status(Status.PARKED):
            self.engine.scheduler.unpark(name)
        for name in self._in_status(Status.PUBLISHING):
            self.engine.scheduler.release(name)

    def commit_oldest_or_nothing(self) -> None:
        """Results come in; complete resumed requests are told."""
        self.engine.commit_one()
        self.engine.collect(self.engine.scheduler.expire(0.0))

    def _in_status(self, status: Status) -> list[str]:
        if self.role is not Role.PREFILL or not hasattr(self, "engine"):
            return []
        return [s.request_id for s in self.engine.scheduler.table.queues[status]]

    def _can_complete(self, *, first: bool = True) -> list[str]:
        return sorted(n for n, f in self.fetches.items() if f.page_table is not None and (f.has_first or not first))

    def _whole(self, name: str) -> list[int]:
        asked = self.requests[name]
        whole = expected(asked.prompt_token_ids, asked.sampling.max_tokens, ignore_eos=asked.sampling.ignore_eos)
        new = whole[len(asked.generated_token_ids) :]
        return new[:1] if self.role is Role.PREFILL else new

    def _check_end(self, name: str, asked: EngineRequest) -> None:
        seen = self.engine.seen.get(name)
        if name in self.silent:
            return
        assert seen is not None
        if seen.last.finish is FinishReason.ERROR:
            return
        assert seen.tokens == self._whole(name)
        assert seen.last.finish is not None or self.role is Role.PREFILL
        with_prompt = [o for o in seen.outputs if o.prompt_logprobs is not None]
        if asked.sampling.prompt_logprobs is not None and not asked.generated_token_ids and self.role is not Role.DECODE:
            assert len(with_prompt) == 1
            tokens = [p.token_id if p else None for p in with_prompt[0].prompt_logprobs or ()]
            assert tokens == [None, *asked.prompt_token_ids[1:]]


class PrefillMachine(WorkerMachine):
    """The same for a prefill worker."""

    role = Role.PREFILL


class DecodeMachine(WorkerMachine):
    """The same for a decode worker."""

    role = Role.DECODE


class _Fixed:
    """Stands in for hypothesis' data when serving the rest: always this value."""

    def __init__(self, value: str) -> None:
        self.value = value

    def draw(self, _: Any) -> str:
        """The value."""
        return self.value


@pytest.mark.timeout(60 + RULES / MIN_RULES_PER_S)
@pytest.mark.covers("H12", "X20", "H18")
@pytest.mark.parametrize("machine", [WorkerMachine, PrefillMachine, DecodeMachine], ids=["unified", "prefill", "decode"])
def test_every_history_keeps_the_invariants(machine: type[WorkerMachine]) -> None:
    machine.num_rules, first = 0, SEED
    while machine.num_rules < RULES / 3:
        run_state_machine_as_test(seed(first)(machine), settings=ROUND)  # every rule and invariant of the machine asserts
        first += 1
    print(f"{machine.__name__}: {machine.num_rules} rules, seeds {SEED} to {first - 1}")
    assert machine.num_rules >= RULES / 3
