"""Which slot stands in which grammar, as slots change hands; the matchers here only note what they were told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jdisagg.core.requests import Grammar, GrammarKind, SamplingParams
from jdisagg.engine.grammar_rows import GrammarRows, advance
from jdisagg.sched.plan import Plan, PrefillChunk, Sampled
from tests.unit.engine.support import admit

BY_GRAMMAR = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a+"))
PROMPT = (5, 6, 7)


@dataclass
class Noted:
    """A place in a grammar that allows everything."""

    token_ids: list[int] = field(default_factory=list)
    error: str = ""

    def advance(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids

    def allowed(self) -> bytes:
        return b"\x0f\x00\x00\x00"


class NotedGrammars:
    """A new place for everyone."""

    def matcher(self, grammar: Grammar) -> Noted:
        return Noted()


def rows_with(slot: int) -> GrammarRows:
    """A sequence with a grammar is in `slot`."""
    rows = GrammarRows(NotedGrammars(), 4)
    rows.admit(admit(slot, (1,), PROMPT, BY_GRAMMAR, generated=(8, 9)))
    return rows


def decoding(*slots: int) -> Plan:
    return Plan(step_id=0, decode=slots)


def test_who_comes_next_into_a_slot_knows_no_grammar_of_who_left_it() -> None:
    rows = rows_with(2)
    assert rows.sampling(decoding(2)) == {2: Noted([8, 9])}
    rows.evict(2)
    assert rows.sampling(decoding(2)) == {}
    rows.admit(admit(2, (1,), PROMPT, BY_GRAMMAR))
    assert rows.sampling(decoding(2)) == {2: Noted()}
    rows.admit(admit(2, (1,), PROMPT))
    assert rows.sampling(decoding(2)) == {}


def test_only_rows_that_sample_have_a_place_in_a_step() -> None:
    rows = rows_with(0)
    rows.admit(admit(1, (2,), PROMPT, BY_GRAMMAR))
    parts = [PrefillChunk(slot=slot, request_id="r", start=0, token_ids=PROMPT, samples=slot == 1) for slot in (0, 1)]
    places = rows.sampling(Plan(step_id=0, prefill=tuple(parts), decode=(3,)))
    assert places == {1: Noted()}
    assert rows.masks(places) == {1: b"\x0f\x00\x00\x00"}


def test_what_a_slot_sampled_moves_the_sequence_on_that_was_in_it_then() -> None:
    rows = rows_with(0)
    before = rows.sampling(decoding(0))
    rows.evict(0)
    rows.admit(admit(0, (1,), PROMPT, BY_GRAMMAR))  # the slot changes hands before the step is read
    sampled = (Sampled(slot=0, token_ids=(10,)), Sampled(slot=4, token_ids=(11,)))
    assert advance(before, sampled) == sampled
    assert before == {0: Noted([8, 9, 10])}
    assert rows.sampling(decoding(0)) == {0: Noted()}


def test_a_token_of_bad_logits_moves_nobody_on() -> None:
    places = rows_with(0).sampling(decoding(0))
    (sampled,) = advance(places, (Sampled(slot=0, token_ids=(10,), bad="NaN"),))
    assert (sampled.bad, sampled.refused) == ("NaN", None)
    assert places == {0: Noted([8, 9])}


def test_where_no_grammar_is_read_the_request_is_refused_with_its_first_token() -> None:
    rows = GrammarRows(None, 4)
    rows.admit(admit(0, (1,), PROMPT, BY_GRAMMAR))
    places = rows.sampling(decoding(0))
    assert rows.masks(places) == {0: b"\xff" * 4}
    (sampled,) = advance(places, (Sampled(slot=0, token_ids=(10,)),))
    assert "cannot read the model's tokenizer" in str(sampled.refused)
