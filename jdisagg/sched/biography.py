"""The life of one request, told from a scheduler that is being replayed: what happened to it, when, and why it waited.

    before() -> the call is made -> after(call, now_s, ...)        once per replayed call, in order

Everything told is read from the scheduler between its calls; nothing is written to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jdisagg.core.errors import Cancelled, RequestError
from jdisagg.core.phases import Phase, Phases
from jdisagg.core.requests import EngineRequest, FinishReason, Output
from jdisagg.core.told import few_of
from jdisagg.sched.explain import Cause, Wait
from jdisagg.sched.log import LoggedScheduler
from jdisagg.sched.plan import Plan
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.states import Status
from jdisagg.sched.wording import counted, in_ms, step_range

_FOR_PAGES = frozenset({Cause.MEMORY, Cause.ORDER, Cause.PREEMPTION})  # waits that end when somebody gives pages up
_NOTABLE_S = 0.0005  # a shorter way from its coming to its first step is no wait


@dataclass(slots=True)
class _Wait:
    """One stretch of steps in which it got nothing for one cause."""

    since_s: float
    first: Wait
    latest: Wait


@dataclass(slots=True)
class _Work:
    """Steps in a row that did the same for it."""

    verb: str
    since_s: float
    steps: list[int] = field(default_factory=list)
    num_tokens: int = 0


class Biography:
    """Tells one request's life; an id that comes again (another attempt) begins another one."""

    def __init__(self, scheduler: LoggedScheduler, request_id: str) -> None:
        self.lines: list[str] = []
        self._scheduler = scheduler
        self._request_id = request_id
        self._sequence: Sequence | None = None  # while it lives
        self._status = Status.FINISHED
        self._added_s = 0.0
        self._phases = Phases(0.0)
        self._wait: _Wait | None = None
        self._work: _Work | None = None
        self._idle_since_s: float | None = None  # it has no work since then
        self._borrows = False  # KV comes from the decode worker, which is no prefill worker
        self._holders: dict[str, tuple[bool, bool]] = {}  # others, before the call: whether they hold pages, a slot
        self._freed_pages: list[str] = []  # by whom, since it was passed over
        self._freed_slots: list[str] = []
        self._num_tokens = 0

    def before(self) -> None:
        """A call is about to be made."""
        others = [s for s in self._scheduler.table.live.values() if s is not self._sequence] if self._sequence else []
        self._holders = {s.request_id: (bool(s.holding.pages), s.slot is not None) for s in others}

    def after(self, call: str, args: tuple[Any, ...], now_s: float, result: Any, error: Exception | None) -> None:
        """The call was made at `now_s` (the latest time known, for calls that bring none)."""
        if call == "add" and args[0].request_id == self._request_id:
            self._begin(args[0], now_s, error)
            return
        if self._sequence is None:
            return
        pages, slots = self._freed()
        if isinstance(result, Plan) and self._planned(result, now_s):
            self._freed_pages.clear()
            self._freed_slots.clear()
        self._freed_pages += pages
        self._freed_slots += slots
        self._tell_parking(now_s)
        self._tell_change(call, args, now_s)
        outputs = result if isinstance(result, list | tuple) else (result,)
        self._take_outputs([o for o in outputs if isinstance(o, Output) and o.request_id == self._request_id], now_s)
        if self._sequence.status is Status.FINISHED:
            self._end(call, now_s)
        else:
            self._status = self._sequence.status

    def close(self, now_s: float) -> None:
        """The log ends here."""
        if self._sequence is not None:
            self._settle(now_s)
            self._say(now_s, f"still {self._status.value} where the log ends; {self._phase_text(now_s)}")

    # --- what happened

    def _begin(self, request: EngineRequest, now_s: float, error: Exception | None) -> None:
        sampling, num_known = request.sampling, len(request.generated_token_ids)
        resumed = f", {num_known} generated before" if num_known else ""
        attempt = f", attempt {request.attempt}" if request.attempt else ""
        trace = f", trace {request.traceparent}" if request.traceparent else ""
        self.lines.append(
            f"request {request.request_id}{attempt}: {counted(len(request.prompt_token_ids), 'prompt token')}, "
            f"at most {sampling.max_tokens} new{resumed}; added at {now_s:.3f} s{trace}"
        )
        self._added_s, self._num_tokens = now_s, 0
        self._phases, self._idle_since_s = Phases(now_s), now_s
        self._wait = self._work = None
        self._borrows = False
        self._sequence = self._scheduler.table.live.get(self._request_id)
        if error is not None:
            self._sequence = None
            text = error.message if isinstance(error, RequestError) else str(error)
            self._say(now_s, f"refused: {type(error).__name__}: {text}")
        elif self._sequence is None:
            self._say(now_s, "complete when it came: only its end was owed")
        else:
            self._status = self._sequence.status
            if held := self._sequence.holding.held_tokens:
                self._say(now_s, f"{held} leading tokens are in the prefix cache here; their pages are pinned")

    def _planned(self, plan: Plan, now_s: float) -> bool:
        """True when the step passed it over."""
        sequence = self._sequence
        assert sequence is not None
        for lost in self._scheduler.preempted:
            if lost.request_id == self._request_id:
                self._lose(lost.wanted_by, lost.num_pages, plan.step_id, now_s)
        for chunk in plan.prefill:
            if chunk.request_id == self._request_id:
                self._work_on("prefilled", plan.step_id, len(chunk.token_ids), now_s)
        if (slot := sequence.slot) is not None and slot in plan.decode:
            self._work_on("decoded", plan.step_id, self._scheduler.num_planned(slot), now_s)
        if self._status is Status.PREALLOC and sequence.status is Status.TRANSFER:
            self._settle(now_s)
            if not self._borrows:
                self._phases.started(now_s)
            pages, first = counted(len(sequence.holding.pages), "page"), sequence.holding.held_tokens
            self._say(now_s, f"got {pages}; KV of tokens [{first}, {sequence.target}) has to come")
            return False
        wait = self._scheduler.why_not(self._request_id)
        if wait is None or wait.cause in (Cause.TRANSFER, Cause.FETCH):
            return False
        self._passed_over(wait, now_s)
        return True

    def _lose(self, wanted_by: str, num_pages: int, step_id: int, now_s: float) -> None:
        sequence = self._sequence
        assert sequence is not None
        self._settle(now_s)
        other = self._scheduler.table.live.get(wanted_by)
        reason = (
            "its own next token: no page was free" if other is sequence else f"request {wanted_by} ({_rank(other, sequence)})"
        )
        loss = "retracted" if self._scheduler.stats.retractions else "preempted"  # one scheduler does one of the two
        self._say(now_s, f"{loss} in step {step_id} for {reason}, {counted(num_pages, 'page')}")
        self._phases.preempted(now_s)
        self._idle_since_s = now_s

    def _tell_parking(self, now_s: float) -> None:
        """Its pages went to others between two plans, or it waits again."""
        assert self._sequence is not None
        if self._sequence.status is Status.PARKED and self._status is not Status.PARKED:
            self._settle(now_s)
            self._say(now_s, "its receiver has no memory yet: its pages go to waiting prompts")
            self._phases.parked(now_s)
            self._num_tokens, self._idle_since_s = 0, now_s  # its token will come once more
        elif self._status is Status.PARKED and self._sequence.status is Status.WAITING:
            self._settle(now_s)
            self._say(now_s, "its receiver has memory: to be computed again")
            self._idle_since_s = now_s

    def _tell_change(self, call: str, args: tuple[Any, ...], now_s: float) -> None:
        """Calls that concern it alone."""
        if not args or args[0] != self._request_id:
            return
        if call == "peer_ready":
            is_ready = args[1] if len(args) > 1 else True
            self._settle(now_s)
            self._say(now_s, "its prefill worker has begun" if is_ready else "no prefill worker has begun with it yet")
            (self._phases.started if is_ready else self._phases.waits)(now_s)
        elif call == "remote_first_token":
            self._settle(now_s)
            if args[1].finish is None:
                self._phases.awaits_kv()
            self._say(now_s, "first token from its prefill worker")
        elif call == "kv_arrived":
            self._phases.kv_arrived(now_s)
            self._say(now_s, "its KV is complete")
            self._idle_since_s = now_s
        elif call == "compute_locally" and self._sequence is not None and self._status is not self._sequence.status:
            self._settle(now_s)
            is_over = "what could be fetched is here, the rest is to be computed"
            self._say(now_s, is_over if self._borrows else "its prefill worker is given up: to be computed here")
            self._phases.kv_given_up(now_s)
            self._idle_since_s = now_s
        elif call == "fetch_first" and self._sequence is not None and self._status is not self._sequence.status:
            self._borrows = True
            self._say(now_s, "KV of its first tokens is fetched from the decode worker before it is computed")

    def _take_outputs(self, outputs: list[Output], now_s: float) -> None:
        for output in outputs:
            if output.token_ids:
                self._num_tokens += len(output.token_ids)
                self._phases.produced(now_s)
            if output.finish is not None:
                self._settle(now_s)
                said = output.finish.value
                if output.error is not None:
                    said = f"{type(output.error).__name__}: {output.error.message}"
                ended = "failed" if output.finish is FinishReason.ERROR else "finished"
                self._say(now_s, f"{ended}: {said}, {counted(self._num_tokens, 'token')}; {self._phase_text(now_s)}")

    def _end(self, call: str, now_s: float) -> None:
        """It is out of the tables."""
        if call == "cancel":
            self._settle(now_s)
            if self._status is Status.PUBLISHING:
                self._phases.handed_over()
            ended = "its hand-off was over" if self._status is Status.PUBLISHING else Cancelled.__name__.lower()
            self._say(
                now_s, f"{ended} while {self._status.value}, {counted(self._num_tokens, 'token')}; {self._phase_text(now_s)}"
            )
        self._sequence = None

    # --- waiting and working

    def _passed_over(self, wait: Wait, now_s: float) -> None:
        if self._wait is None or (self._wait.first.cause, self._wait.first.about) != (wait.cause, wait.about):
            self._settle(now_s)
            self._wait = _Wait(now_s if self._idle_since_s is None else self._idle_since_s, wait, wait)
        self._wait.latest = wait

    def _work_on(self, verb: str, step_id: int, num_tokens: int, now_s: float) -> None:
        if self._work is None or self._work.verb != verb:
            if self._wait is None and self._idle_since_s is not None and now_s - self._idle_since_s >= _NOTABLE_S:
                self._say(self._idle_since_s, f"waited {in_ms(now_s - self._idle_since_s)} for the next step")
            self._settle(now_s)
            self._work = _Work(verb, now_s)
        self._phases.started(now_s)
        self._idle_since_s = None
        self._work.steps.append(step_id)
        self._work.num_tokens += num_tokens

    def _settle(self, now_s: float) -> None:
        """Tell what went on until now."""
        wait, self._wait = self._wait, None
        work, self._work = self._work, None
        if wait is not None:
            later = "" if wait.latest.text == wait.first.text else f"; at last {wait.latest.text}"
            self._say(wait.since_s, f"waited {in_ms(now_s - wait.since_s)}: {wait.first.text}{later}{self._by_whom(wait)}")
            self._idle_since_s = now_s
        if work is not None:
            steps, what = step_range(work.steps), "chunk" if work.verb == "prefilled" else "step"
            count, tokens = counted(len(work.steps), what), counted(work.num_tokens, "token")
            self._say(work.since_s, f"{work.verb} in {count}: {steps}, {tokens}{self._cached(work)}")

    def _cached(self, work: _Work) -> str:
        cached = self._sequence.told.cached_tokens if self._sequence is not None else None
        return f" ({cached} more were in the prefix cache)" if cached and work.verb == "prefilled" else ""

    def _by_whom(self, wait: _Wait) -> str:
        cause = wait.latest.cause
        names = self._freed_slots if cause is Cause.SLOT else self._freed_pages if cause in _FOR_PAGES else []
        return f", freed when {few_of(list(dict.fromkeys(names)), ', ')}" if names else ""

    def _freed(self) -> tuple[list[str], list[str]]:
        """Others that gave pages, or their slot, back in this call."""
        live, pages, slots = self._scheduler.table.live, list[str](), list[str]()
        for request_id, (had_pages, had_slot) in self._holders.items():
            sequence = live.get(request_id)
            how = "ended" if sequence is None else "was set back" if not sequence.holding.pages else "left its slot"
            if had_pages and (sequence is None or not sequence.holding.pages):
                pages.append(f"request {request_id} {how}")
            if had_slot and (sequence is None or sequence.slot is None):
                slots.append(f"request {request_id} {how}")
        return pages, slots

    def _phase_text(self, now_s: float) -> str:
        self._phases.ended(now_s)
        parts = [f"{phase.value} {in_ms(self._phases.seconds[phase])}" for phase in Phase if phase in self._phases.seconds]
        return f"{' + '.join(parts)} = {in_ms(self._phases.total_s)}"

    def _say(self, at_s: float, text: str) -> None:
        self.lines.append(f"  +{in_ms(at_s - self._added_s):<9} {text}")


def _rank(other: Sequence | None, sequence: Sequence) -> str:
    if other is None:
        return "gone since"
    (rank, number), (own_rank, own_number) = other.order, sequence.order
    return "older" if rank == own_rank and (number < 0) == (own_number < 0) else "goes before"
