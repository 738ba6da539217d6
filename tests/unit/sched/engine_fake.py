"""A device whose tokens a reader computes by hand, and a loop around the real scheduler.

The "KV" of a position is its token id, stored in the page the plan says. The next token is the sum of all tokens read back
through the page table, modulo VOCAB: one page read before it was written, shared wrongly or overwritten changes the answer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.requests import EngineRequest, Output, Role, SamplingParams, TokenLogprob
from jdisagg.sched.log import LoggedScheduler
from jdisagg.sched.plan import PageTable, Plan, PrefillChunk, Sampled, StepResult

VOCAB = 31
EOS = 0
FAR_S = 1e9


def next_token(tokens: tuple[int, ...] | list[int]) -> int:
    """The whole model."""
    return sum(tokens) % VOCAB


def expected(prompt: tuple[int, ...], max_tokens: int, *, ignore_eos: bool = True) -> list[int]:
    """What a request must get, from nothing but the model's definition."""
    out: list[int] = []
    while len(out) < max_tokens and not (out and out[-1] == EOS and not ignore_eos):
        out.append(next_token([*prompt, *out]))
    return out


def request(
    request_id: str,
    prompt: tuple[int, ...],
    max_tokens: int = 4,
    *,
    ignore_eos: bool = True,
    deadline_s: float = FAR_S,
    generated: tuple[int, ...] = (),
    priority: int = 0,
    salt: str = "",
    fork_group: str = "",
    **sampling: Any,
) -> EngineRequest:
    """A request with short notation."""
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **sampling),
        deadline_s=deadline_s,
        generated_token_ids=generated,
        priority=priority,
        cache_salt=salt,
        fork_group=fork_group,
    )


@dataclass
class SlotState:
    """One row of the device-resident decode state."""

    pages: list[int]
    length: int  # positions whose KV is written
    last_token: int  # fed next
    scores: bool = False  # log-probabilities are wanted


class FakeDevice:
    """Executes plans in order of dispatch, strictly: anything a real device would get wrong silently raises here."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.memory: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self.page_size = page_size
        self.slots: dict[int, SlotState] = {}
        self.host: dict[str, list[int]] = {}  # KV kept in host memory
        self.num_forward_tokens = 0
        self.num_copied_pages = 0
        self.bad: set[int] = set()  # slots whose next sample is NaN

    def dispatch(self, plan: Plan) -> StepResult:
        """One step; its result may be committed any time later."""
        for key in plan.forget:
            del self.host[key]
        for copy in plan.offload:
            self.host[copy.key] = self.read(copy.page_table[0], copy.num_tokens)
        for slot in plan.evict:
            del self.slots[slot]
        for admit in plan.admit:
            assert admit.slot not in self.slots, "admitted into a slot that was not evicted"
            tokens = admit.prompt_token_ids + admit.generated_token_ids
            self.slots[admit.slot] = SlotState(
                list(admit.page_table[0]), len(tokens) - 1, tokens[-1], admit.sampling.logprobs is not None
            )
        for page in plan.pages:
            assert page.index == len(self.slots[page.slot].pages), "a page is appended out of order"
            self.slots[page.slot].pages.append(page.page)
        for copy in plan.restore:
            for position, token in enumerate(self.host.pop(copy.key)):
                self.write(copy.page_table[0], position, token)
        for copy in plan.copies:
            assert copy.source != copy.target
            self.memory[copy.target] = list(self.memory[copy.source])
            self.num_copied_pages += 1
        sampled = [self._prefill(chunk) for chunk in plan.prefill]
        sampled += [self._decode(slot, plan.num_steps) for slot in plan.decode]
        self.num_forward_tokens += plan.num_tokens
        logprobs = {c.slot: tuple(TokenLogprob(t, -1.0) for t in c.targets) for c in plan.prefill if c.targets is not None}
        return StepResult(step_id=plan.step_id, sampled=tuple(s for s in sampled if s is not None), prompt_logprobs=logprobs)

    def write(self, pages: list[int] | tuple[int, ...], position: int, token: int) -> None:
        """Store the KV of one position; the null page and positions past the table are bugs."""
        page = pages[position // self.page_size]
        assert page != 0, "the null page got real KV"
        self.memory[page][position % self.page_size] = token

    def read(self, pages: list[int] | tuple[int, ...], length: int) -> list[int]:
        """KV of positions [0, length)."""
        tokens = [self.memory[pages[i // self.page_size]][i % self.page_size] for i in range(length)]
        assert None not in tokens, "KV is read that nobody wrote"
        return [t for t in tokens if t is not None]

    def import_tokens(self, page_table: PageTable, tokens: tuple[int, ...], begin: int, end: int) -> None:
        """KV of [begin, end) arrives from a peer."""
        for position in range(begin, end):
            self.write(page_table[0], position, tokens[position])

    def _prefill(self, chunk: PrefillChunk) -> Sampled | None:
        state = self.slots[chunk.slot]
        for i, token in enumerate(chunk.token_ids):
            self.write(state.pages, chunk.start + i, token)
        state.length = chunk.start + len(chunk.token_ids)
        return self._sample(chunk.slot, state) if chunk.samples else None

    def _decode(self, slot: int, num_steps: int) -> Sampled:
        """What lies past the reserved pages is thrown away, as the null page does; the first step has its page."""
        state = self.slots[slot]
        steps = []
        for number in range(num_steps):
            if number and state.length >= len(state.pages) * self.page_size:
                steps.append(steps[-1])  # junk: nobody may take it
                continue
            self.write(state.pages, state.length, state.last_token)
            state.length += 1
            steps.append(self._sample(slot, state))
        tokens = tuple(token for step in steps for token in step.token_ids)
        logprobs = tuple(logprob for step in steps for logprob in step.logprobs or ()) if state.scores else None
        return Sampled(slot=slot, token_ids=tokens, logprobs=logprobs, bad=steps[0].bad)

    def _sample(self, slot: int, state: SlotState) -> Sampled:
        state.last_token = next_token(self.read(state.pages, state.length))
        bad = "NaN in layer 1" if slot in self.bad else None
        self.bad.discard(slot)
        return Sampled(
            slot=slot,
            token_ids=(state.last_token,),
            logprobs=(TokenLogprob(state.last_token, -0.5),) if state.scores else None,
            bad=bad,
        )


@dataclass
class Seen:
    """What one request has got."""

    tokens: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    @property
    def last(self) -> Output:
        """Its latest output."""
        return self.outputs[-1]


class FakeEngine:
    """The loop of a role: plan, dispatch, commit `delay` steps late; checks budgets and invariants every tick."""

    def __init__(
        self,
        role: Role = Role.UNIFIED,
        *,
        num_pages: int = 33,
        page_size: int = 4,
        max_model_len: int = 64,
        delay: int = 1,
        caching: bool = True,
        local_prefill: bool = True,
        host_tokens: int = 0,
        **config: Any,
    ) -> None:
        defaults: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "reserved_decode_tokens": 0}
        self.config = SchedulerConfig(**{**defaults, **config})
        self.scheduler = LoggedScheduler(
            self.config,
            role=role,
            max_model_len=max_model_len,
            page_size=page_size,
            num_pages=num_pages,
            eos_token_ids=(EOS,),
            enable_prefix_caching=caching,
            local_prefill=local_prefill,
            host_tokens=host_tokens,
        )
        self.device = FakeDevice(num_pages, page_size)
        self.delay = delay
        self.in_flight: deque[StepResult] = deque()
        self.plans: list[Plan] = []
        self.seen: dict[str, Seen] = {}
        self.now_s = 0.0

    def add(self, *requests: EngineRequest, **options: Any) -> None:
        """Queue requests."""
        for r in requests:
            self.scheduler.add(r, self.now_s, **options)

    def tick(self) -> Plan:
        """One turn of the loop."""
        self.collect(self.scheduler.expire(self.now_s))
        plan = self.step()
        if len(self.in_flight) > self.delay or plan.is_empty:
            self.commit_one()
        return plan

    def step(self) -> Plan:
        """Plan and dispatch, commit nothing."""
        plan = self.scheduler.schedule(self.now_s)
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len({c.slot for c in plan.prefill} | set(plan.decode)) == len(plan.prefill) + len(plan.decode), (
            "one row per slot"
        )
        if not plan.is_empty:
            self.plans.append(plan)
            self.in_flight.append(self.device.dispatch(plan))
        self.scheduler.check()
        return plan

    def commit_one(self) -> None:
        """Take the oldest result in."""
        if self.in_flight:
            self.collect(self.scheduler.commit(self.in_flight.popleft(), self.now_s))
            self.scheduler.check()

    def collect(self, outputs: list[Output]) -> None:
        """Append outputs to what their requests have seen; nothing may follow a finish."""
        for output in outputs:
            seen = self.seen.setdefault(output.request_id, Seen())
            assert not seen.outputs or seen.last.finish is None, f"{output.request_id} got something after its end"
            seen.outputs.append(output)
            seen.tokens += output.token_ids

    def run(self, max_ticks: int = 400) -> None:
        """Until idle; then nothing may be left anywhere."""
        for _ in range(max_ticks):
            if self.scheduler.is_idle() and not self.in_flight:
                assert self.scheduler.num_free_pages == self.scheduler.num_pages
                assert not self.device.slots, "the device still holds a slot"
                assert not self.device.host, "a host copy is left"
                return
            self.tick()
        raise AssertionError(f"not idle after {max_ticks} ticks: {self.scheduler.snapshot()}")
