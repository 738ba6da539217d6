"""Who starts in a step: choices that fork from a sibling, those whose KV is in place, and those who wait for memory."""

from __future__ import annotations

from jdisagg.core.config import SchedulerConfig
from jdisagg.sched.admission import Admission
from jdisagg.sched.plan import Admit, HostCopy, PageCopy
from jdisagg.sched.rows import RowPlanner
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.states import Status
from jdisagg.sched.steps import Draft
from jdisagg.sched.table import SequenceTable


class Starter:
    """Gives slots and memory. Order is (rank, arrival) throughout."""

    def __init__(
        self,
        table: SequenceTable,
        admission: Admission,
        rows: RowPlanner,
        config: SchedulerConfig,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._table = table
        self._admission = admission
        self._rows = rows
        self._config = config
        self._eos = eos_token_ids

    def start(self, draft: Draft, donors: dict[str, Sequence]) -> None:
        """Let in whoever can go; `donors`: whom those that wait to fork can fork from, by request id. After a preemption nobody
        new may take what was just freed."""
        if self._table.preempted:
            return
        blocked: list[Sequence] = []
        if donors:
            self._fork(draft, donors, blocked)
        self._start_ready(draft, donors)
        queues = self._table.queues
        waiting = queues[Status.PREALLOC] or (queues[Status.WAITING] and self._can_compute(draft))
        if waiting and not self._table.preempted:
            self._start_waiting(draft, blocked)

    def _start_ready(self, draft: Draft, donors: dict[str, Sequence]) -> None:
        """Sequences whose KV is in place, from a peer or a sibling, take free slots and decode at once. One that waits to be
        computed here, or restored, and whose turn is before theirs goes first when it fits: under load there is always somebody
        whose KV has come."""
        table = self._table
        has_room = True
        for sequence in table.queues[Status.READY]:
            while has_room and not table.preempted and not self._is_short and self._can_compute(draft):
                earlier = self._waiting_before(sequence, donors)
                if earlier is None:
                    break
                self._admission.weigh_host_copy(earlier)
                has_room = not self._is_too_long(draft, earlier) and self._admission.take_memory(earlier)
                if has_room:
                    self._start_one(draft, earlier)
            if not self._can_compute(draft):
                return
            if sequence.status is not Status.READY:
                continue  # lost its pages to an earlier one in this loop
            if sequence.num_known > draft.reads:
                draft.reads = 0  # nobody passes it, or shorter ones would for ever
                return
            if (
                table.queues[Status.RUNNING]
                and table.pages.grow(sequence.holding, self._rows.pages_to_decode(sequence)) is None
            ):
                return  # those running will free pages
            if not self._rows.make_room(draft, sequence):
                return
            self._decode_from_now_on(draft, sequence)

    def _waiting_before(self, ready: Sequence, donors: dict[str, Sequence]) -> Sequence | None:
        """Who needs memory and a slot and comes before `ready`, and before all others that could take memory now."""
        queues = self._table.queues
        first = queues[Status.WAITING].at(0)
        if first is None or first.order > ready.order:
            return None
        if any(child.request_id in donors for child in queues[Status.FORKING].before(first)):
            return None
        return None if any(remote.wait.is_open for remote in queues[Status.PREALLOC].before(first)) else first

    def _fork(self, draft: Draft, donors: dict[str, Sequence], blocked: list[Sequence]) -> None:
        """Choices whose prompt is in memory take their share of it before anybody takes more; then they wait for a slot."""
        table = self._table
        for child in table.queues[Status.FORKING]:
            if self._is_short:
                return
            donor = donors.get(child.request_id)
            if donor is None:
                continue
            if not self._admission.share_memory(child, donor):
                blocked.append(child)
                continue
            table.move(child, Status.READY)
            table.stats.forks += 1
            boundary, offset = divmod(child.num_computed, table.pages.page_size)
            if offset:
                source, target = donor.holding.pages[boundary], child.holding.pages[boundary]
                draft.copies.append(PageCopy(group=0, source=source, target=target))

    def _start_waiting(self, draft: Draft, blocked: list[Sequence]) -> None:
        """Give memory to those who wait for it, in order, whether they compute here (slot and budget too) or fetch.

        Whose peer is not ready is passed over. Who lacks memory, or a slot that those who fetch do not need yet, lets at most
        `max_bypass` later ones go first, in its whole life, and none after it was preempted: then all behind it wait until it
        fits. When nothing but pins of waiting ones is in its way, anybody may pass, or nobody would ever free a page.
        """
        waiting, prealloc = self._table.queues[Status.WAITING], self._table.queues[Status.PREALLOC]
        i = j = 0
        while not (self._is_short or self._is_closed_by(blocked)):
            local, remote, can_compute = waiting.at(i), prealloc.at(j), self._can_compute(draft)
            if remote is not None and not remote.wait.is_open:
                j += 1
                continue
            candidates = [s for s in (local, remote) if s is not None]
            if not candidates or (remote is None and not can_compute):
                return
            sequence = min(candidates, key=lambda s: s.order)
            self._admission.weigh_host_copy(sequence)
            if sequence is local and can_compute and self._is_too_long(draft, sequence):
                return
            if (sequence is remote or can_compute) and self._admission.take_memory(sequence):
                for passed in blocked:
                    passed.wait.num_bypassed += 1
                self._start_one(draft, sequence)
            else:
                blocked.append(sequence)
                if sequence is local:
                    i += 1
                else:
                    j += 1

    @property
    def _is_short(self) -> bool:
        """Below the safety margin nothing new starts while somebody goes on, one that started in this very step included."""
        return self._rows.is_scarce and self._table.someone_holds_memory

    def _is_closed_by(self, blocked: list[Sequence]) -> bool:
        """Nobody may pass those who lack memory any more, or there are more of them than are looked past."""
        if not blocked or not self._table.someone_holds_memory:
            return False
        limit = self._config.max_bypass
        return len(blocked) > limit or any(s.wait.was_preempted or s.wait.num_bypassed >= limit for s in blocked)

    def _is_too_long(self, draft: Draft, sequence: Sequence) -> bool:
        """It cannot go in parts (its KV comes back from the host, or chunks are off), and the rest of this step does not hold
        what it needs. It goes first in a later one."""
        if sequence.wait.host_tokens:
            return sequence.num_known > draft.reads
        if self._config.enable_chunked_prefill:
            return False
        found = len(self._admission.find_prefix(sequence)) * self._table.pages.page_size
        return sequence.target - found > draft.budget or sequence.target > draft.reads

    def _can_compute(self, draft: Draft) -> bool:
        return self._table.slots.num_free > 0 and draft.budget > 0 and draft.reads > 0

    def _start_one(self, draft: Draft, sequence: Sequence) -> None:
        if sequence.status is Status.PREALLOC:
            self._table.move(sequence, Status.TRANSFER)
            self._table.reserved.append(sequence)
        elif sequence.wait.host_tokens:
            request_id, num_tokens = sequence.request_id, sequence.wait.host_tokens
            draft.restore.append(HostCopy(key=request_id, page_table=sequence.holding.page_table, num_tokens=num_tokens))
            self._table.host.restored(request_id)
            self._table.stats.restored_tokens += num_tokens
            sequence.wait.host_tokens = 0
            self._decode_from_now_on(draft, sequence)
        else:
            self._occupy(draft, sequence, decodes=False)
            self._rows.plan_chunk(draft, sequence)

    def _decode_from_now_on(self, draft: Draft, sequence: Sequence) -> None:
        self._occupy(draft, sequence, decodes=True)
        self._rows.plan_decode(draft, sequence)

    def _occupy(self, draft: Draft, sequence: Sequence, *, decodes: bool) -> None:
        slot = sequence.slot = self._table.slots.take()
        self._table.stats.served += 1
        self._table.move(sequence, Status.RUNNING)
        draft.admit.append(
            Admit(
                slot=slot,
                request_id=sequence.request_id,
                choice=sequence.request.choice,
                sampling=sequence.request.sampling,
                eos_token_ids=self._eos,
                page_table=sequence.holding.page_table,
                prompt_token_ids=sequence.request.prompt_token_ids,
                generated_token_ids=tuple(sequence.generated),
                decodes=decodes,
            )
        )
