"""Who starts in a step: choices that fork from a sibling, those whose KV is in place, and those who wait for memory."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.config import SchedulerConfig
from jdisagg.sched.admission import Admission
from jdisagg.sched.plan import Admit, HostCopy, PageCopy
from jdisagg.sched.rows import RowPlanner
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.states import Status
from jdisagg.sched.steps import Draft
from jdisagg.sched.table import SequenceTable


@dataclass(frozen=True, slots=True)
class Starter:
    """Gives slots and memory. Order is (rank, arrival) throughout."""

    table: SequenceTable
    admission: Admission
    rows: RowPlanner
    config: SchedulerConfig

    def start(self, draft: Draft, donors: dict[Sequence, Sequence]) -> None:
        """Let in whoever can go; `donors`: who can fork, in order, and from whom. After a preemption nobody new may take what
        was just freed."""
        if self.table.preempted:
            return
        blocked: list[Sequence] = []
        self._fork(draft, donors, blocked)
        self._start_in_order(draft, blocked)

    def _fork(self, draft: Draft, donors: dict[Sequence, Sequence], blocked: list[Sequence]) -> None:
        """Choices whose prompt is in memory take their share of it before anybody takes more; then they wait for a slot."""
        table = self.table
        for child, donor in donors.items():
            if self._is_short:
                return
            if not self.admission.share_memory(child, donor):
                blocked.append(child)
                continue
            table.move(child, Status.READY)
            table.stats.forks += 1
            boundary, offset = divmod(child.num_computed, table.pages.page_size)
            if offset:
                source, target = donor.holding.pages[boundary], child.holding.pages[boundary]
                draft.copies.append(PageCopy(source=source, target=target))

    def _start_in_order(self, draft: Draft, blocked: list[Sequence]) -> None:
        """Give slots and memory in order, to those whose KV is in place (`ready`), those who are computed or restored here
        (`local`; slot and budget, too) and those who fetch (`remote`; no slot yet). `blocked` lack memory so far.

        Whose KV is in place waits for nobody but a local one whose turn comes before its own, and who passes nobody: under load
        there is always somebody whose KV has come.

        Whose peer is not ready is passed over. Who lacks memory, or a slot that those who fetch do not need yet, lets at most
        `max_bypass` later ones go first, in its whole life, and none after it was preempted: then all behind it wait until it
        fits. When nothing but pins of waiting ones is in its way, anybody may pass, or nobody would ever free a page.
        """
        queues = self.table.queues
        ready_may_go = new_may_go = True
        i = j = 0  # so many that wait to be computed, or to fetch, are passed over
        while True:
            can_compute = self._can_compute(draft)
            ready = queues[Status.READY].at(0) if ready_may_go and can_compute else None
            new_may_go = new_may_go and not (self.table.preempted or self._is_short)
            local = queues[Status.WAITING].at(i) if new_may_go else None
            remote = queues[Status.PREALLOC].at(j) if new_may_go else None
            while remote is not None and not remote.wait.is_open:
                j += 1
                remote = queues[Status.PREALLOC].at(j)
            first = min((s for s in (local, remote) if s is not None), key=lambda s: s.order, default=None)
            passed = [s for s in blocked if first is not None and s.order < first.order]
            if self._is_closed_by(passed):
                new_may_go = False
                continue
            # one that fetches needs no slot: behind it `local` may be the one whose turn is before that of `ready`
            second = local if first is remote and local is not None else first
            if ready is not None and not _goes_before(second, ready, passed):
                ready_may_go = self._start_ready(draft, ready)
                continue
            if first is None or (remote is None and not can_compute):
                return
            if can_compute:
                self.admission.weigh_host_copy(first)
            if first is local and can_compute and self._is_too_long(draft, first):
                new_may_go = False
            elif (first is remote or can_compute) and self.admission.take_memory(first):
                for other in passed:
                    other.wait.num_bypassed += 1
                self._start_new(draft, first)
            else:
                blocked.append(first)
                i, j = i + (first is local), j + (first is remote)

    def _start_ready(self, draft: Draft, sequence: Sequence) -> bool:
        """Its KV is in place, from a peer or a sibling: it decodes at once, if there is a page for that. When False, nobody
        behind it does so in this step."""
        if sequence.num_known > draft.reads:
            draft.reads = 0  # nobody passes it, or shorter ones would for ever
            return False
        nobody_frees_pages = not self.table.queues[Status.RUNNING]
        if not self.rows.make_room(draft, sequence, preempts=nobody_frees_pages):
            return False
        self._decode_from_now_on(draft, sequence)
        return True

    @property
    def _is_short(self) -> bool:
        """Below the safety margin nothing new starts while somebody goes on, one that started in this very step included."""
        return self.rows.is_scarce and self.table.someone_holds_memory

    def _is_closed_by(self, blocked: list[Sequence]) -> bool:
        """Nobody may pass those who lack memory any more, or there are more of them than are looked past."""
        if not blocked or not self.table.someone_holds_memory:
            return False
        limit = self.config.max_bypass
        return len(blocked) > limit or any(s.wait.was_preempted or s.wait.num_bypassed >= limit for s in blocked)

    def _is_too_long(self, draft: Draft, sequence: Sequence) -> bool:
        """It cannot go in parts (its KV comes back from the host, or chunks are off), and the rest of this step does not hold
        what it needs. It goes first in a later one."""
        if sequence.wait.host_tokens:
            return sequence.num_known > draft.reads
        if self.config.enable_chunked_prefill:
            return False
        found = len(self.admission.find_prefix(sequence)) * self.table.pages.page_size
        return sequence.target - found > draft.budget or sequence.target > draft.reads

    def _can_compute(self, draft: Draft) -> bool:
        return self.table.slots.num_free > 0 and draft.budget > 0 and draft.reads > 0

    def _start_new(self, draft: Draft, sequence: Sequence) -> None:
        if sequence.status is Status.PREALLOC:
            self.table.move(sequence, Status.TRANSFER)
            self.table.reserved.append(sequence)
        elif sequence.wait.host_tokens:
            num_tokens, pages = sequence.wait.host_tokens, sequence.holding.page_table
            draft.restore.append(HostCopy(key=sequence.request_id, page_table=pages, num_tokens=num_tokens))
            self.table.host.restored(sequence)
            self.table.stats.restored_tokens += num_tokens
            self._decode_from_now_on(draft, sequence)
        else:
            self._occupy(draft, sequence, decodes=False)
            self.rows.plan_chunk(draft, sequence)

    def _decode_from_now_on(self, draft: Draft, sequence: Sequence) -> None:
        self._occupy(draft, sequence, decodes=True)
        self.rows.plan_decode(draft, sequence)

    def _occupy(self, draft: Draft, sequence: Sequence, *, decodes: bool) -> None:
        slot = sequence.slot = self.table.slots.take()
        self.table.stats.served += 1
        self.table.move(sequence, Status.RUNNING)
        draft.admit.append(
            Admit(
                slot=slot,
                request_id=sequence.request_id,
                choice=sequence.request.choice,
                sampling=sequence.request.sampling,
                stop_ids=tuple(sorted(sequence.stop_ids)),
                page_table=sequence.holding.page_table,
                prompt_token_ids=sequence.request.prompt_token_ids,
                generated_token_ids=tuple(sequence.generated),
                decodes=decodes,
            )
        )


def _goes_before(first: Sequence | None, ready: Sequence, passed: list[Sequence]) -> bool:
    """Whether one that needs memory and a slot is to have the slot that `ready` could take."""
    return first is not None and first.status is Status.WAITING and first.order < ready.order and not passed
