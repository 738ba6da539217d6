"""A device that executes plans on pages which know what they hold: what a real one would get wrong silently raises here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jdisagg.core.requests import TokenLogprob
from jdisagg.sched.plan import Admit, PageTable, Plan, PrefillChunk, Sampled, StepResult
from tests.unit.sched.content_fake import Cell, FakePages, chain, next_token


@dataclass
class SlotState:
    """One row of the device-resident decode state."""

    request_id: str
    pages: list[int]
    cells: list[Cell]  # of all tokens known here: those it came with, then those sampled
    length: int  # positions whose KV is written; the token fed next is at this one
    scores: bool = False  # log-probabilities are wanted
    by_grammar: bool = False  # what it may sample next, the host has to know its last token to say
    num_known: int = 0  # tokens that the host knows


class FakeDevice:
    """Executes plans in order of dispatch, strictly: anything a real device would get wrong silently raises here.

    Rows of one step run side by side: all write, then all read, and what a row reads no other row of the step has written.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.pages = FakePages(num_pages, page_size)
        self.slots: dict[int, SlotState] = {}
        self.host: dict[str, list[Cell]] = {}  # KV kept in host memory
        self.salts: dict[str, str] = {}  # of requests that have one
        self.num_forward_tokens = 0
        self.num_copied_pages = 0
        self.bad: set[int] = set()  # slots whose next sample is NaN
        self.spoiled: set[str] = set()  # requests of which a sample was
        self.unscored: set[int] = set()  # positions of prompt tokens whose log-probability is NaN
        self._sampled_by: dict[int, dict[int, SlotState]] = {}  # step that is not read -> slot -> who had it
        self.computed_by: dict[int, int] = {}  # page -> latest step whose rows wrote to it

    def dispatch(self, plan: Plan) -> StepResult:
        """One step; its result may be committed any time later."""
        for key in plan.forget:
            del self.host[key]
        self.pages.copy(plan.copies)
        self.num_copied_pages += len(plan.copies)
        for copy in plan.offload:
            self.host[copy.key] = self.pages.take(copy.page_table[0], copy.num_tokens)
        for slot in plan.evict:
            del self.slots[slot]
        for admit in plan.admit:
            self._admit(admit)
        for page in plan.pages:
            assert page.index == len(self.slots[page.slot].pages), "a page is appended out of order"
            self.slots[page.slot].pages.append(page.page)
        for copy in plan.restore:
            kept = self.host.pop(copy.key)
            assert len(kept) == copy.num_tokens, f"{len(kept)} tokens of {copy.key} are kept, {copy.num_tokens} restored"
            for cell in kept:
                self.pages.write(copy.page_table[0], cell)
        sampled = self._compute(plan)
        self.num_forward_tokens += plan.num_tokens
        logprobs = {c.slot: self._scores(c) for c in plan.prefill if c.targets is not None}
        self._sampled_by[plan.step_id] = {one.slot: self.slots[one.slot] for one in sampled}
        return StepResult(step_id=plan.step_id, sampled=sampled, prompt_logprobs=logprobs)

    def read(self, pages: list[int] | tuple[int, ...], length: int) -> list[int]:
        """Tokens whose KV is at positions [0, length)."""
        return [cell.token for cell in self.pages.take(pages, length)]

    def import_tokens(self, page_table: PageTable, tokens: tuple[int, ...], begin: int, end: int, salt: str = "") -> None:
        """KV of [begin, end) arrives from a peer."""
        for cell in chain(tokens[:end], salt)[begin:]:
            page = self.pages.write(page_table[0], cell)
            self.computed_by.pop(page, None)  # whoever had it before: what is there now needs no step

    def known(self, result: StepResult) -> None:
        """The host has read a step's tokens: those of the sequences that were in its slots then."""
        states = self._sampled_by.pop(result.step_id)
        for one in result.sampled:
            states[one.slot].num_known += len(one.token_ids)

    def _admit(self, admit: Admit) -> None:
        assert admit.slot not in self.slots, "admitted into a slot that was not evicted"
        cells = chain(admit.prompt_token_ids + admit.generated_token_ids, self.salts.get(admit.request_id, ""))
        scores = admit.sampling.logprobs is not None
        by_grammar = admit.sampling.grammar is not None
        self.slots[admit.slot] = SlotState(
            admit.request_id, list(admit.page_table[0]), cells, len(cells) - 1, scores, by_grammar, len(cells)
        )

    def _compute(self, plan: Plan) -> tuple[Sampled, ...]:
        """Prompt chunks beside the first decode step, then the other decode steps. What lies past the reserved pages is thrown
        away, as the null page does; the first step has its page."""
        writers: dict[int, int] = {}
        for chunk in plan.prefill:
            self._write(chunk.slot, chunk.start, chunk.start + len(chunk.token_ids), writers, chunk.token_ids)
        self._feed(plan.decode, writers)
        sampled = []
        for chunk in plan.prefill:
            state = self._read(chunk.slot, writers)
            if chunk.samples:
                assert state.length == len(state.cells), f"{chunk} samples before the last token"
                sampled.append(self._sample(chunk.slot))
        steps = [{slot: self._decode(slot, writers) for slot in plan.decode}]
        for _ in range(1, plan.num_steps):
            self.computed_by.update(dict.fromkeys(writers, plan.step_id))
            writers.clear()
            going_on = [slot for slot in plan.decode if self._has_page(self.slots[slot])]
            self._feed(going_on, writers)
            steps.append(steps[-1] | {slot: self._decode(slot, writers) for slot in going_on})  # the others' is junk
        self.computed_by.update(dict.fromkeys(writers, plan.step_id))
        return (*sampled, *(self._joined([step[slot] for step in steps]) for slot in plan.decode))

    def _has_page(self, state: SlotState) -> bool:
        return state.length < len(state.pages) * self.pages.page_size

    def _feed(self, slots: Sequence[int], writers: dict[int, int]) -> None:
        for slot in slots:
            length = self.slots[slot].length
            self._write(slot, length, length + 1, writers)

    def _write(self, slot: int, begin: int, end: int, writers: dict[int, int], tokens: Sequence[int] | None = None) -> None:
        state = self.slots[slot]
        new = state.cells[begin:end]
        assert len(new) == end - begin, f"slot {slot} writes [{begin}, {end}) of {len(state.cells)} tokens"
        assert tokens is None or tuple(tokens) == tuple(cell.token for cell in new), f"a chunk of slot {slot} has other tokens"
        for cell in new:
            page = self.pages.write(state.pages, cell)
            assert writers.setdefault(page, slot) == slot, f"slots {writers[page]} and {slot} write page {page} in one step"
        state.length = end

    def _read(self, slot: int, writers: dict[int, int]) -> SlotState:
        """Attention: everything up to what was written."""
        state = self.slots[slot]
        self.pages.expect(state.pages, state.cells, state.length)
        for page in state.pages:
            assert writers.get(page, slot) == slot, f"slot {slot} reads page {page}, which slot {writers[page]} writes"
        return state

    def _scores(self, chunk: PrefillChunk) -> tuple[TokenLogprob, ...]:
        targets = enumerate(chunk.targets or (), start=chunk.start + 1)
        return tuple(TokenLogprob(token, math.nan if at in self.unscored else -1.0) for at, token in targets)

    def _decode(self, slot: int, writers: dict[int, int]) -> Sampled:
        self._read(slot, writers)
        return self._sample(slot)

    def _sample(self, slot: int) -> Sampled:
        state = self.slots[slot]
        assert not state.by_grammar or state.num_known == len(state.cells), f"slot {slot} samples, its mask is an old one"
        token = next_token([cell.token for cell in state.cells])
        state.cells.append(state.cells[-1].next(token))
        bad = "NaN in layer 1" if slot in self.bad else None
        if bad is not None:
            self.bad.discard(slot)
            self.spoiled.add(state.request_id)
        logprobs = (TokenLogprob(token, -0.5),) if state.scores else None
        return Sampled(slot=slot, token_ids=(token,), logprobs=logprobs, bad=bad)

    @staticmethod
    def _joined(steps: list[Sampled]) -> Sampled:
        """Several decode steps of one slot as one result, which ends with a bad one."""
        if steps[0].bad is not None:
            return steps[0]
        logprobs = tuple(logprob for step in steps for logprob in step.logprobs or ())
        return Sampled(
            slot=steps[0].slot,
            token_ids=tuple(token for step in steps for token in step.token_ids),
            logprobs=logprobs if steps[0].logprobs is not None else None,
        )
