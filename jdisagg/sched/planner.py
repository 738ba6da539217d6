"""Decides one step: running decodes, then running prefills, then admissions, all within one token budget.

There are no phases: a sequence is planned until its computed tokens have caught up with its known ones.
"""

from __future__ import annotations

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.requests import Role
from jdisagg.sched.admission import Admission
from jdisagg.sched.intake import Limits
from jdisagg.sched.plan import Admit, PageAppend, PrefillChunk
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.states import Status
from jdisagg.sched.steps import Draft, Row
from jdisagg.sched.table import SequenceTable


class Planner:
    """Moves sequences of its table and drafts the step that follows from it."""

    def __init__(
        self,
        table: SequenceTable,
        admission: Admission,
        config: SchedulerConfig,
        limits: Limits,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._table = table
        self._admission = admission
        self._config = config
        self._limits = limits
        self._eos = eos_token_ids

    def draft(self) -> Draft:
        """Plan one step. Order is (priority, arrival) throughout, so equal histories give equal drafts."""
        draft = Draft(self._config.max_num_batched_tokens)
        self._table.preempted.clear()
        if self._limits.role is not Role.PREFILL:
            self._plan_decodes(draft)
        for sequence in self._table.queues[Status.RUNNING]:
            if not sequence.is_decoding:
                self._plan_chunk(draft, sequence)
        if not draft.preempted:
            self._start_ready(draft)
        if not draft.preempted:
            self._admit_in_order(draft)
        return draft

    def _plan_decodes(self, draft: Draft) -> None:
        for sequence in self._table.queues[Status.RUNNING]:
            # One that lost its pages to an earlier one in this loop has everything to compute again: it may not decode.
            if sequence.may_decode and draft.budget > 0 and self._make_room(draft, sequence):
                self._plan_decode(draft, sequence)

    def _make_room(self, draft: Draft, sequence: Sequence) -> bool:
        """Get the page of the next position, from later sequences if need be. False when it had to give up its own."""
        wanted = self._pages_to_decode(sequence)
        first = len(sequence.holding.pages)
        if wanted <= first:
            return True
        while (new := self._table.pages.grow(sequence.holding, wanted)) is None:
            victim = self._table.later_victim()
            assert victim is not None, "no page is free and nobody holds one"
            assert victim.slot not in draft.rows, "a victim was planned before its better"
            self._table.preempt(victim, sequence)
            draft.preempted = True
            if victim is sequence:
                return False
        if sequence.slot is not None:
            slot = sequence.slot
            draft.appends.extend(PageAppend(slot=slot, group=0, index=first + i, page=page) for i, page in enumerate(new))
        return True

    def _pages_to_decode(self, sequence: Sequence) -> int:
        """Pages for the token fed next and the lookahead, never beyond the sequence's longest."""
        length = sequence.num_known + sequence.num_in_flight + self._limits.num_lookahead
        return self._table.pages.pages_for(min(length, self._limits.max_model_len))

    def _plan_decode(self, draft: Draft, sequence: Sequence) -> None:
        assert sequence.slot is not None
        sequence.num_scheduled += 1
        sequence.num_in_flight += 1
        draft.budget -= 1
        draft.decode.append(sequence.slot)
        draft.rows[sequence.slot] = Row(sequence, sequence.epoch, sequence.num_scheduled, samples=True)
        self._table.stats.decode_tokens += 1

    def _plan_chunk(self, draft: Draft, sequence: Sequence) -> None:
        """The next piece of a prompt, as long as budget and threshold allow; nothing when the budget is spent."""
        cap = self._config.long_prefill_token_threshold or draft.budget
        begin = sequence.num_scheduled
        length = min(sequence.target - begin, draft.budget, cap)
        if length <= 0:
            return
        assert sequence.slot is not None
        end = begin + length
        samples = end == sequence.target
        targets = None
        if sequence.wants_prompt_logprobs:
            targets = sequence.tokens(begin + 1, min(end + 1, len(sequence.request.prompt_token_ids))) or None
        draft.prefill.append(
            PrefillChunk(
                slot=sequence.slot,
                request_id=sequence.request_id,
                start=begin,
                token_ids=sequence.tokens(begin, end),
                samples=samples,
                targets=targets,
                num_top=(sequence.request.sampling.prompt_logprobs or 0) if targets else 0,
            )
        )
        sequence.num_scheduled = end
        sequence.num_in_flight += samples
        draft.budget -= length
        draft.rows[sequence.slot] = Row(sequence, sequence.epoch, end, samples)
        self._table.stats.prefill_tokens += length

    def _start_ready(self, draft: Draft) -> None:
        """Sequences whose KV has arrived take free slots and decode at once."""
        table = self._table
        for sequence in table.queues[Status.READY]:
            if not table.slots.num_free or draft.budget <= 0:
                return
            if sequence.status is not Status.READY:
                continue  # lost its pages to an earlier one in this loop
            if table.queues[Status.RUNNING] and table.pages.grow(sequence.holding, self._pages_to_decode(sequence)) is None:
                return  # those running will free pages
            if not self._make_room(draft, sequence):
                return
            self._occupy(draft, sequence, decodes=True)
            self._plan_decode(draft, sequence)

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

    def _admit_in_order(self, draft: Draft) -> None:
        """Give memory to those who wait for it, oldest first, whether they compute here (slot and budget too) or fetch.

        Who cannot go for another reason than memory (no slot, no budget, peer not ready) is passed over; who lacks memory
        stops the rest, or many small ones would starve it. Only when nothing but pins of waiting ones is in its way, it waits.
        """
        waiting, prealloc = self._table.queues[Status.WAITING], self._table.queues[Status.PREALLOC]
        i = j = 0
        promised = self._table.outstanding_pages() if waiting or prealloc else 0
        while True:
            can_compute = self._table.slots.num_free > 0 and draft.budget > 0
            local, remote = waiting.at(i) if can_compute else None, prealloc.at(j)
            if remote is not None and not remote.is_open:
                j += 1
                continue
            candidates = [s for s in (local, remote) if s is not None]
            if not candidates:
                return
            sequence = min(candidates, key=lambda s: s.order)
            if self._admission.take_memory(sequence, promised):
                promised += sequence.holding.outstanding_pages
                if sequence is local:
                    self._occupy(draft, sequence, decodes=False)
                    self._plan_chunk(draft, sequence)
                else:
                    self._table.move(sequence, Status.TRANSFER)
                    self._table.reserved.append(sequence)
            elif self._table.someone_holds_memory:
                return
            elif sequence is local:
                i += 1
            else:
                j += 1
