"""Who starts in a step: those whose KV has arrived, choices that fork from a sibling, and those who wait for memory."""

from __future__ import annotations

from jdisagg.core.config import SchedulerConfig
from jdisagg.sched.admission import Admission
from jdisagg.sched.plan import Admit, PageCopy
from jdisagg.sched.rows import RowPlanner, host_copy
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

    def donors(self) -> dict[str, Sequence]:
        """For each sequence that waits to fork, the sibling it can fork from: to be asked before a step is drafted, since
        pages are copied before the chunks of the same step are computed."""
        found = ((s.request_id, self._table.groups.donor(s)) for s in self._table.queues[Status.FORKING])
        return {request_id: donor for request_id, donor in found if donor is not None}

    def start(self, draft: Draft, donors: dict[str, Sequence]) -> None:
        """Let in whoever can go. After a preemption nobody new may take what was just freed."""
        if not draft.preempted:
            self._start_ready(draft)
        if draft.preempted or (self._rows.is_scarce and self._table.someone_holds_memory):
            return
        queues = self._table.queues
        if not (queues[Status.FORKING] or queues[Status.WAITING] or queues[Status.PREALLOC]):
            return
        promised = self._table.outstanding_pages()
        blocked: list[Sequence] = []
        promised = self._fork(draft, donors, promised, blocked)
        self._start_waiting(draft, promised, blocked)

    def _start_ready(self, draft: Draft) -> None:
        """Sequences whose KV has arrived take free slots and decode at once."""
        table = self._table
        for sequence in table.queues[Status.READY]:
            if not self._can_compute(draft):
                return
            if sequence.status is not Status.READY:
                continue  # lost its pages to an earlier one in this loop
            if sequence.num_known > draft.reads:
                continue
            if (
                table.queues[Status.RUNNING]
                and table.pages.grow(sequence.holding, self._rows.pages_to_decode(sequence)) is None
            ):
                return  # those running will free pages
            if not self._rows.make_room(draft, sequence):
                return
            self._decode_from_now_on(draft, sequence)

    def _fork(self, draft: Draft, donors: dict[str, Sequence], promised: int, blocked: list[Sequence]) -> int:
        """Choices whose prompt is in memory go before all who need more; returns the pages promised by now."""
        table = self._table
        for child in table.queues[Status.FORKING]:
            if not self._can_compute(draft):
                break
            donor = donors.get(child.request_id)
            if donor is None or child.num_known > draft.reads:
                continue
            if not self._admission.share_memory(child, donor, promised):
                blocked.append(child)
                continue
            promised += child.holding.outstanding_pages
            table.stats.forks += 1
            boundary, offset = divmod(child.num_computed, table.pages.page_size)
            if offset:
                source, target = donor.holding.pages[boundary], child.holding.pages[boundary]
                draft.copies.append(PageCopy(group=0, source=source, target=target))
            self._decode_from_now_on(draft, child)
        return promised

    def _start_waiting(self, draft: Draft, promised: int, blocked: list[Sequence]) -> None:
        """Give memory to those who wait for it, in order, whether they compute here (slot and budget too) or fetch.

        Who cannot go for another reason than memory (no slot, no budget, peer not ready) is passed over. Who lacks memory lets
        at most `max_bypass` later ones go first, in its whole life, and none after it was preempted: then all behind it wait
        until it fits. When nothing but pins of waiting ones is in its way, anybody may pass, or nobody would ever free a page.
        """
        waiting, prealloc = self._table.queues[Status.WAITING], self._table.queues[Status.PREALLOC]
        i = j = 0
        while not self._is_closed_by(blocked):
            local, remote = waiting.at(i) if self._can_compute(draft) else None, prealloc.at(j)
            if remote is not None and not remote.is_open:
                j += 1
                continue
            candidates = [s for s in (local, remote) if s is not None]
            if not candidates:
                return
            sequence = min(candidates, key=lambda s: s.order)
            if sequence is local and self._is_too_long(draft, sequence):
                return
            if self._admission.take_memory(sequence, promised):
                promised += sequence.holding.outstanding_pages
                for passed in blocked:
                    passed.num_bypassed += 1
                self._start_one(draft, sequence)
            else:
                blocked.append(sequence)
                if sequence is local:
                    i += 1
                else:
                    j += 1

    def _is_closed_by(self, blocked: list[Sequence]) -> bool:
        """Nobody may pass those who lack memory any more; looking further than may pass would cost time for nothing."""
        if not blocked or not self._table.someone_holds_memory:
            return False
        limit = self._config.max_bypass
        return len(blocked) > limit or any(s.was_preempted or s.num_bypassed >= limit for s in blocked)

    def _is_too_long(self, draft: Draft, sequence: Sequence) -> bool:
        """Without chunks: the rest of this step does not hold what is missing of it. It goes first in a later one."""
        if self._config.enable_chunked_prefill or sequence.host_tokens:
            return False
        found = len(self._admission.find_prefix(sequence)) * self._table.pages.page_size
        return sequence.target - found > draft.budget or sequence.target > draft.reads

    def _can_compute(self, draft: Draft) -> bool:
        return self._table.slots.num_free > 0 and draft.budget > 0 and draft.reads > 0

    def _start_one(self, draft: Draft, sequence: Sequence) -> None:
        if sequence.status is Status.PREALLOC:
            self._table.move(sequence, Status.TRANSFER)
            self._table.reserved.append(sequence)
        elif sequence.host_tokens:
            draft.restore.append(host_copy(sequence))
            self._table.host.restored(sequence.request_id)
            self._table.stats.restored_tokens += sequence.host_tokens
            sequence.host_tokens = 0
            self._decode_from_now_on(draft, sequence)
        else:
            self._occupy(draft, sequence, decodes=False)
            self._rows.plan_chunk(draft, sequence)

    def _decode_from_now_on(self, draft: Draft, sequence: Sequence) -> None:
        self._occupy(draft, sequence, decodes=True)
        self._rows.plan_decode(draft, sequence)

    def _occupy(self, draft: Draft, sequence: Sequence, *, decodes: bool) -> None:
        slot = sequence.slot = self._table.slots.take()
        self._table.move(sequence, Status.RUNNING)
        draft.admit.append(
            Admit(
                slot=slot,
                request_id=sequence.request_id,
                choice=sequence.request.choice,
                sampling=sequence.request.sampling,
                eos_token_ids=self._eos,
                page_table=(tuple(sequence.holding.pages),),
                prompt_token_ids=sequence.request.prompt_token_ids,
                generated_token_ids=tuple(sequence.generated),
                decodes=decodes,
            )
        )
