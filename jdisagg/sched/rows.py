"""What running sequences do in a step: decode rows and prompt chunks, within the step's budgets, and the pages for them."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.requests import Role
from jdisagg.sched.intake import Limits
from jdisagg.sched.plan import PageAppend, PrefillChunk
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.states import Status
from jdisagg.sched.steps import Draft, Row
from jdisagg.sched.table import SequenceTable


@dataclass(frozen=True, slots=True)
class RowPlanner:
    """Adds rows to a draft. Running sequences that find no page take those of the last in order, themselves included.

    There are no phases: a sequence is planned until its computed tokens have caught up with its known ones.
    """

    table: SequenceTable
    config: SchedulerConfig
    limits: Limits

    def draft(self) -> Draft:
        """The next step as far as those that run go: decodes before prompts, except with the policy prefill-first."""
        reads = self.config.max_num_kv_read_tokens or float("inf")
        draft = Draft(self.config.max_num_batched_tokens, reads, num_steps=self._num_steps(reads))
        if self.limits.role is Role.PREFILL:
            self._plan_chunks(draft)
        elif self.config.scheduling_policy == "prefill-first":
            self._plan_chunks(draft)
            self._plan_decodes(draft)
        else:
            self._plan_decodes(draft)
            self._plan_chunks(draft)
        return draft

    # --- decode rows

    def _num_steps(self, reads: float) -> int:
        """Decode steps of this dispatch: one unless nothing but decoding goes on and pages for all of them are free."""
        wanted, running = self.config.num_scheduler_steps, self.table.queues[Status.RUNNING]
        if wanted == 1 or self.limits.role is Role.PREFILL or len(running) < len(self.table.live):
            return 1
        if not all(s.is_decoding and s.request.sampling.grammar is None for s in running):
            return 1
        num_steps = min(wanted, max((s.num_wanted for s in running), default=1))
        if num_steps <= 1:
            return 1
        pages = sum(max(0, self.pages_to_decode(s, num_steps) - len(s.holding.pages)) for s in running)
        tokens = sum(s.num_known + s.num_in_flight + num_steps for s in running)
        return num_steps if pages <= self.table.pages.num_free and tokens <= reads else 1

    def _plan_decodes(self, draft: Draft) -> None:
        """One row for every running sequence that wants a token, in order, as far as budgets and pages go."""
        rows, page_size = draft.rows, self.limits.page_size
        ahead = draft.num_steps + self.limits.num_lookahead
        for sequence in self.table.queues[Status.RUNNING]:
            # One that lost its pages to an earlier one in this loop has everything to compute again: it may not decode.
            begin = sequence.num_scheduled
            if begin < sequence.target or sequence.num_wanted <= 0 or sequence.slot in rows:
                continue
            if draft.budget <= 0:
                return
            if begin >= draft.reads or sequence.awaits_token:
                continue
            if begin + ahead <= len(sequence.holding.pages) * page_size or self.make_room(draft, sequence):
                self.plan_decode(draft, sequence)

    def make_room(self, draft: Draft, sequence: Sequence, *, preempts: bool = True) -> bool:
        """Get the page of the next position, if need be, and if it `preempts`, from later sequences. False when there was none,
        or it had to give up its own."""
        wanted = self.pages_to_decode(sequence, draft.num_steps)
        first = len(sequence.holding.pages)
        if wanted <= first:
            return True
        while (new := self.table.pages.grow(sequence.holding, wanted)) is None:
            if not preempts:
                return False
            victim = self.table.later_victim()
            assert victim is not None, "no page is free and nobody holds one"
            self._preempt(draft, victim, sequence)
            if victim is sequence:
                return False
        if sequence.slot is not None:
            slot = sequence.slot
            draft.appends.extend(PageAppend(slot=slot, index=first + i, page=page) for i, page in enumerate(new))
        return True

    def pages_to_decode(self, sequence: Sequence, num_steps: int = 1) -> int:
        """Pages for the tokens fed in the next `num_steps` steps and the lookahead, never beyond the sequence's longest."""
        more = min(num_steps, max(1, sequence.num_wanted)) - 1
        length = sequence.num_known + sequence.num_in_flight + more + self.limits.num_lookahead
        return self.table.pages.pages_for(min(length, self.limits.max_model_len))

    def plan_decode(self, draft: Draft, sequence: Sequence) -> None:
        """A row for a sequence that has a slot and its pages."""
        assert sequence.slot is not None
        count = min(draft.num_steps, sequence.num_wanted)
        sequence.num_scheduled += count
        sequence.num_in_flight += count
        draft.budget -= 1
        draft.reads -= sequence.num_scheduled
        draft.decode.append(sequence.slot)
        draft.rows[sequence.slot] = Row(sequence, sequence.epoch, sequence.num_scheduled, count)
        draft.by_grammar |= sequence.request.sampling.grammar is not None

    def _preempt(self, draft: Draft, victim: Sequence, wanted_by: Sequence) -> None:
        draft.undo(victim)
        if (copy := self.table.preempt(victim, wanted_by)) is not None:
            draft.offload.append(copy)

    # --- prompt chunks

    def _plan_chunks(self, draft: Draft) -> None:
        """The next piece of every running sequence that is not decoding yet; of the first only when memory is scarce."""
        if len(draft.rows) == len(self.table.queues[Status.RUNNING]):
            return
        scarce = self.is_scarce
        for sequence in self.table.queues[Status.RUNNING]:
            if sequence.is_decoding:
                continue
            self.plan_chunk(draft, sequence)
            if sequence.num_scheduled >= draft.reads and sequence.slot not in draft.rows:
                draft.reads = 0  # nobody new starts before it, or shorter ones would for ever
            if scarce:
                return

    @property
    def is_scarce(self) -> bool:
        """Less of the pool is free than the safety margin wants."""
        margin = self.config.safety_margin
        return margin > 0 and self.table.pages.num_free < margin * self.limits.num_usable_pages

    def chunk_length(self, draft: Draft, sequence: Sequence) -> int:
        """Tokens of its prompt that fit into what is left of this step; 0 = none."""
        begin = sequence.num_scheduled
        missing = sequence.target - begin
        room = min(draft.budget, max(0, draft.reads - begin))
        if not self.config.enable_chunked_prefill:
            return missing if missing <= room else 0
        return int(min(missing, room, self.config.long_prefill_token_threshold or missing))

    def plan_chunk(self, draft: Draft, sequence: Sequence) -> None:
        """The next piece of a prompt; nothing when a budget is spent."""
        length = self.chunk_length(draft, sequence)
        if length <= 0:
            return
        assert sequence.slot is not None
        begin = sequence.num_scheduled
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
        draft.by_grammar |= samples and sequence.request.sampling.grammar is not None
        draft.budget -= length
        draft.reads -= end
        draft.rows[sequence.slot] = Row(sequence, sequence.epoch, end, int(samples))
