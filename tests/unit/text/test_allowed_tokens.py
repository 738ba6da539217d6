"""`allowed_token_ids` as a grammar of tokens: each of them may come next, always, and nothing else, be it an EOS."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.api.generation.sampling_bounds import MAX_GRAMMAR_BYTES
from jdisagg.api.http.body import Body
from jdisagg.api.http.grammars import MAX_ALLOWED, read_grammar
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Grammar
from jdisagg.text.grammar import Grammars
from tests.unit.text.grammar_rig import allowed, demo_grammars, walk

EOS = (1, 5)  # the demo's two
SIZE = 4096


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return demo_grammars()


def grammar_of(*token_ids: int) -> Grammar:
    grammar = read_grammar(Body({"allowed_token_ids": list(token_ids)}))
    assert grammar is not None
    return grammar


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, SIZE - 1) | st.sampled_from(EOS), min_size=2, max_size=40), st.integers(0, 99))
def test_these_may_come_next_always_and_nothing_else(grammars: Grammars, token_ids: set[int], seed: int) -> None:
    matcher = grammars.matcher(grammar_of(*token_ids))
    answer = walk(matcher, EOS, seed)
    assert set(answer) <= token_ids
    assert len(answer) == 60 or answer[-1] in EOS
    assert allowed(matcher) == token_ids


def test_an_end_of_the_model_is_one_only_where_it_is_among_them(grammars: Grammars) -> None:
    for others in ((), (1,), (5,), EOS):
        assert allowed(grammars.matcher(grammar_of(300, 301, *others))) == {300, 301, *others}


@pytest.mark.parametrize("token_id", [0, 1, 300, SIZE - 1])
def test_a_single_one_comes_a_thousand_times(grammars: Grammars, token_id: int) -> None:
    matcher = grammars.matcher(grammar_of(token_id))
    for _ in range(1000):
        assert allowed(matcher) == {token_id}
        matcher.advance([token_id])
    assert matcher.error == ""
    assert allowed(matcher) == set(EOS), "it has to end some time"


def test_a_long_answer_of_any_of_half_the_vocabulary_stays_within_the_limits(grammars: Grammars) -> None:
    token_ids = range(6, SIZE, 2)
    matcher = grammars.matcher(grammar_of(*token_ids))
    for _ in range(5):
        matcher.advance(list(token_ids))
        assert matcher.error == ""
    assert allowed(matcher) == set(token_ids)


@pytest.mark.parametrize(
    ("token_ids", "said"),
    [([-1, 4], "allowed_token_ids: token ids must be at least 0; got -1"), ([2**40, 4], "too large"), ([SIZE, 4], "4096")],
)
def test_what_is_no_token_is_refused(grammars: Grammars, token_ids: list[int], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        grammars.compile(grammar_of(*token_ids))


def test_more_than_a_grammar_holds_are_refused_by_their_own_name_and_ranges_take_little_room() -> None:
    many = list(range(0, 100_000, 2))
    with pytest.raises(InvalidRequest, match="allowed_token_ids: may hold some 10,000 ids") as refused:
        grammar_of(*many)
    assert refused.value.field == "allowed_token_ids"
    with pytest.raises(InvalidRequest, match=f"allowed_token_ids: may hold at most {MAX_ALLOWED} ids; got {MAX_ALLOWED + 1}"):
        grammar_of(*range(MAX_ALLOWED + 1))
    assert grammar_of(*range(MAX_ALLOWED))
    assert grammar_of(*range(100_000)).text == "start: <[0-99999]> start"
    longest = [100_000 + 2 * number for number in range(9_300)]
    assert all(high - low == 2 for low, high in pairwise(longest))
    assert len(grammar_of(*longest).text) < MAX_GRAMMAR_BYTES
