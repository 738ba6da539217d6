"""A loop around the real scheduler and a fake device, whose tokens a reader computes by hand."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.requests import EngineRequest, Output, Role, SamplingParams
from jdisagg.sched.log import LoggedScheduler
from jdisagg.sched.plan import Plan, StepResult
from tests.unit.sched.content_fake import EOS, next_token
from tests.unit.sched.device_fake import FakeDevice

FAR_S = 1e9
SIZE = 4  # tokens per page


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
    num_asked: int = 1,
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
        num_asked=num_asked,
    )


@dataclass
class Seen:
    """What one request has got."""

    tokens: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    last_s: float = 0.0  # when the latest of them came

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
        page_size: int = SIZE,
        max_model_len: int = 64,
        delay: int = 1,
        caching: bool = True,
        local_prefill: bool = True,
        host_tokens: int = 0,
        **config: Any,
    ) -> None:
        defaults: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "reserved_decode_tokens": 0}
        self.config = SchedulerConfig(**{**defaults, **config})
        self.role = role
        self.scheduler = LoggedScheduler(
            self.config,
            role=role,
            clock=lambda: self.now_s,
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
        self.silent: set[str] = set()  # cancelled: nothing may come any more
        self.now_s = 0.0

    def add(self, *requests: EngineRequest, remote: bool = False, is_open: bool = True, **options: Any) -> None:
        """Queue requests; the peers of remote ones have begun, unless `is_open` is False."""
        for r in requests:
            self.scheduler.add(r, self.now_s, remote=remote, **options)
            if remote and is_open:
                self.scheduler.peer_ready(r.request_id)
            self.device.salts[r.request_id] = r.cache_salt

    def drop(self, request_id: str) -> None:
        """The client is gone, or the peer has all it needs."""
        self.silent.add(request_id)
        self.scheduler.cancel(request_id)

    def tick(self) -> Plan:
        """One turn of the loop."""
        self.collect(self.scheduler.expire(self.now_s))
        plan = self.step()
        if len(self.in_flight) > self.delay or plan.is_empty:
            self.commit_one()
        return plan

    def step(self) -> Plan:
        """Plan and dispatch, commit nothing. What was free before is blank: it has to be written before it is read."""
        self.device.pages.blank(self.scheduler.table.pages._allocator._free)
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
            result = self.in_flight.popleft()
            self.device.known(result)
            self.collect(self.scheduler.commit(result))
            self.scheduler.check()

    def collect(self, outputs: list[Output]) -> None:
        """Append outputs to what their requests have seen; nothing may follow a finish."""
        for output in outputs:
            seen = self.seen.setdefault(output.request_id, Seen())
            assert not seen.outputs or seen.last.finish is None, f"{output.request_id} got something after its end"
            assert output.request_id not in self.silent, f"{output.request_id} got something after it was cancelled"
            seen.outputs.append(output)
            seen.last_s = self.now_s
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
