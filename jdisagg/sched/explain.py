"""Why a live request did nothing in the step just planned, read from the scheduler's own tables; changes none of them.

Valid after a call of `schedule` until the next call: pages, slots and budget are then as the planner left them when it passed
the request over. The arithmetic is the planner's own (`Admission.needs`, `RowPlanner.pages_to_decode`, ..); what it does not
explain is said to be unexplained.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.requests import Role
from jdisagg.sched.admission import Admission
from jdisagg.sched.intake import Limits
from jdisagg.sched.plan import Plan
from jdisagg.sched.rows import RowPlanner
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.states import Status
from jdisagg.sched.table import SequenceTable
from jdisagg.sched.wording import counted

_MAX_NAMED = 2  # prompts named as spenders of a budget; the rest is a count


class Cause(Enum):
    """What a request waits for."""

    MEMORY = "pages"
    ORDER = "earlier requests"
    SLOT = "slot"
    BUDGET = "token budget"
    READS = "read budget"
    MARGIN = "safety margin"
    SIBLING = "sibling"
    PREEMPTION = "preemption"
    PEER = "peer"
    TRANSFER = "transfer"
    FETCH = "fetch"
    TOKEN = "its last token"
    RECEIVER = "receiver"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Wait:
    """`text` is a clause without a subject; `about` the request that is in the way, when one is."""

    cause: Cause
    text: str
    about: str = ""


@dataclass(frozen=True)
class Explainer:
    """Reads one scheduler's tables, behind `plan`, the latest. What is the same for all that wait is looked up once."""

    table: SequenceTable
    admission: Admission
    rows: RowPlanner
    config: SchedulerConfig
    limits: Limits
    plan: Plan

    def why_not(self, request_id: str) -> Wait | None:
        """Why the plan has no work for it. None: it has, or nothing is left to plan, or the request is not live."""
        sequence = self.table.live.get(request_id)
        if sequence is None:
            return None
        match sequence.status:
            case Status.FORKING:
                return self._forking(sequence)
            case Status.WAITING | Status.PREALLOC:
                return self._outside(sequence)
            case Status.READY:
                return self._ready(sequence)
            case Status.RUNNING:
                return self._running(sequence)
            case Status.TRANSFER:
                return Wait(Cause.TRANSFER, "its KV is on the way")
            case Status.PARKED:
                return Wait(Cause.RECEIVER, "its receiver has no memory for its KV; waiting prompts got its pages")
            case _:
                return Wait(Cause.FETCH, "its receiver has not fetched all of its KV")

    def _outside(self, sequence: Sequence) -> Wait:
        """Without memory: `Starter._start_in_order`."""
        if (wait := self._preemption() or self._margin()) is not None:
            return wait
        if sequence.status is Status.PREALLOC and not sequence.wait.is_open:
            return Wait(Cause.PEER, "its prefill worker has not begun with it")
        if sequence.status is Status.WAITING and (wait := self._no_room_in_step) is not None:
            return wait
        if (short := self._shortage(sequence)) is not None:
            return Wait(Cause.MEMORY, short)
        if sequence.status is Status.WAITING and (wait := self._no_reads(sequence) or self._no_room_for_whole(sequence)):
            return wait
        if self._first_in_the_way is not None:
            first, wait = self._first_in_the_way
            if first.order < sequence.order:
                return wait
        return _unexplained(sequence, self.plan)

    def _forking(self, sequence: Sequence) -> Wait:
        """A choice without memory: `Starter._fork`."""
        donor = self._donors.get(sequence)
        begun = {step.slot for step in (*self.plan.prefill, *self.plan.admit)}
        short = self._shortage(sequence)
        came_with_kv = donor is not None and donor.slot in self.plan.decode  # from a peer, or a sibling's
        if donor is None or (donor.slot in begun and not (came_with_kv and short)):
            return Wait(Cause.SIBLING, "the prompt it shares with its siblings was not in memory yet")
        if (wait := self._preemption() or self._margin()) is not None:
            return wait
        if short is not None:
            return Wait(Cause.MEMORY, short)
        return _unexplained(sequence, self.plan)

    def _margin(self) -> Wait | None:
        if not self.rows.is_scarce or not self.table.someone_holds_memory:
            return None
        free = counted(self.table.pages.num_free, "page")
        return Wait(Cause.MARGIN, f"{free} free, below the safety margin of {self.config.safety_margin:.0%}")

    def _no_reads(self, sequence: Sequence) -> Wait | None:
        if sequence.num_known + sequence.num_in_flight <= self.table.reads_left:
            return None
        limit = self.config.max_num_kv_read_tokens
        return Wait(Cause.READS, f"read budget of {limit} spent, {max(0, int(self.table.reads_left))} tokens left")

    def _no_room_for_whole(self, sequence: Sequence) -> Wait | None:
        """Without chunked prefill."""
        if self.config.enable_chunked_prefill or sequence.wait.host_tokens:
            return None
        missing = sequence.target - len(self.admission.find_prefix(sequence)) * self.table.pages.page_size
        left = self.config.max_num_batched_tokens - self.plan.num_tokens
        if missing <= left and sequence.target > self.table.reads_left:
            return self._no_reads(sequence)
        if missing <= left:
            return None
        return Wait(Cause.BUDGET, f"its {missing} tokens do not fit whole into the {left} that were left of the step")

    def _ready(self, sequence: Sequence) -> Wait:
        """KV in place: `Starter._start_ready`."""
        if (wait := self._preemption() or self._no_room_in_step or self._no_reads(sequence)) is not None:
            return wait
        for other in self.table.queues[Status.READY]:
            if other.order <= sequence.order and (missing := self._missing_to_decode(other)):
                short = f"{counted(missing, 'page')} short for the next token ({self.table.pages.num_free} free)"
                if other is sequence:
                    return Wait(Cause.MEMORY, short)
                return Wait(Cause.ORDER, f"behind request {other.request_id}, {short}", other.request_id)
        return _unexplained(sequence, self.plan)

    def _running(self, sequence: Sequence) -> Wait | None:
        """In a slot."""
        if sequence.slot in self.plan.decode or any(chunk.slot == sequence.slot for chunk in self.plan.prefill):
            return None
        if sequence.is_decoding and (sequence.num_wanted <= 0 or self.limits.role is Role.PREFILL):
            return None
        if sequence.awaits_token:
            return Wait(Cause.TOKEN, "what its grammar allows next follows from the token of the step before")
        waits = self._no_budget() or self._no_reads(sequence)
        return waits or (None if sequence.is_decoding else self._margin()) or _unexplained(sequence, self.plan)

    def _preemption(self) -> Wait | None:
        if not self.table.preempted:
            return None
        first = self.table.preempted[0]
        itself = first.wanted_by == first.request_id
        took = "set request {0} back, no page being free" if itself else "took the pages of request {0} for {1}"
        text = f"step {self.plan.step_id} {took.format(first.request_id, first.wanted_by)}; such a step starts nobody"
        return Wait(Cause.PREEMPTION, text, first.request_id)

    @cached_property
    def _no_room_in_step(self) -> Wait | None:
        slots = self.table.slots
        if slots.num_free == 0:
            return Wait(Cause.SLOT, f"no slot, all {slots.num_slots} taken")
        return self._no_budget()

    def _no_budget(self) -> Wait | None:
        limit = self.config.max_num_batched_tokens
        if self.plan.num_tokens < limit:
            return None
        chunks = sorted(self.plan.prefill, key=lambda chunk: -len(chunk.token_ids))
        named = [
            f"{counted(len(chunk.token_ids), 'prompt token')} of request {chunk.request_id}" for chunk in chunks[:_MAX_NAMED]
        ]
        if len(chunks) > _MAX_NAMED:
            named.append(f"{sum(len(chunk.token_ids) for chunk in chunks[_MAX_NAMED:])} of {len(chunks) - _MAX_NAMED} others")
        if self.plan.decode:
            named.append(f"{len(self.plan.decode)} decoding")
        return Wait(Cause.BUDGET, f"token budget of {limit} spent by {' + '.join(named)}")

    def _shortage(self, sequence: Sequence) -> str | None:
        """How far the gate's need is from what is free."""
        needs, pages = self.admission.needs(sequence), self.table.pages
        short = needs - pages.num_unpromised
        if short <= 0:
            return None
        kept = f", {pages.num_promised} promised to admitted requests" if pages.num_promised else ""
        return f"{counted(short, 'page')} short (needs {needs}, {pages.num_free} free{kept})"

    @cached_property
    def _first_in_the_way(self) -> tuple[Sequence, Wait] | None:
        """The first of those that could go and have to wait, and what is said to all whose turn comes after."""
        queues = self.table.queues
        open_ones = [s for s in queues[Status.PREALLOC] if s.wait.is_open]
        for first in sorted([*self._donors, *open_ones, *queues[Status.WAITING]], key=lambda s: s.order):
            is_local = first.status is Status.WAITING
            no_parts = first.wait.host_tokens or self.table.reads_left <= 0
            whole = self._no_reads if no_parts else self._no_room_for_whole
            if is_local and (wait := self._no_room_in_step or whole(first)):
                return first, Wait(Cause.ORDER, f"behind request {first.request_id}: {wait.text}", first.request_id)
            if (short := self._shortage(first)) is not None:
                return first, Wait(Cause.ORDER, f"behind request {first.request_id}, {short}", first.request_id)
        return None

    @cached_property
    def _donors(self) -> dict[Sequence, Sequence]:
        return self.table.groups.donors(self.table.queues)

    def _missing_to_decode(self, sequence: Sequence) -> int:
        wanted = self.rows.pages_to_decode(sequence) - len(sequence.holding.pages)
        return max(0, wanted - self.table.pages.num_free)


def _unexplained(sequence: Sequence, plan: Plan) -> Wait:
    return Wait(Cause.UNEXPLAINED, f"step {plan.step_id} passed it over while {sequence.status.value}, by no rule known here")
