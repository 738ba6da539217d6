"""`bad_words` as a grammar: a text without them is free, and none of them is ever completed, however it is cut into tokens."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jdisagg.core.errors import InvalidRequest
from jdisagg.text.bad_words import without
from jdisagg.text.grammar import Grammars
from tests.unit.text.grammar_rig import allowed, demo_grammars, demo_tokenizer, text_of, walk

EOS = (1, 5)  # the demo's two
SPECIAL = (0, 2, 3, 4)
WORDS = st.lists(st.text("abehnt é/\n😀", min_size=1, max_size=3), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return demo_grammars()


@settings(max_examples=60, deadline=None)
@given(WORDS, st.integers(0, 99))
def test_no_answer_holds_one(grammars: Grammars, words: list[str], seed: int) -> None:
    token_ids = walk(grammars.matcher(without(words, ())), EOS, seed)
    text = text_of(demo_tokenizer(), token_ids, EOS)
    assert not [word for word in words if word in text]


@settings(max_examples=60, deadline=None)
@given(WORDS, st.text("abehnt é/\n😀xyz", max_size=40))
def test_a_text_without_them_may_be_written_and_end_anywhere(grammars: Grammars, words: list[str], text: str) -> None:
    assume(not [word for word in words if word in text])
    matcher = grammars.matcher(without(words, SPECIAL))
    for token_id in demo_tokenizer().encode(text, add_special_tokens=False):
        assert token_id in allowed(matcher)
        matcher.advance([token_id])
        so_far = matcher.error
        assert so_far == ""
    assert {*EOS, *SPECIAL} <= allowed(matcher)


@pytest.mark.parametrize("cut", [["import"], ["im", "port"], ["i", "m", "p", "o", "r", "t"]])
def test_a_word_is_not_completed_whichever_tokens_it_is_made_of(grammars: Grammars, cut: list[str]) -> None:
    matcher = grammars.matcher(without(["import"], SPECIAL))
    *before, last = [token_id for part in cut for token_id in demo_tokenizer().encode(part, add_special_tokens=False)]
    matcher.advance(before)
    assert matcher.error == ""
    assert last not in allowed(matcher)


def test_what_is_no_text_may_stand_anywhere_and_only_where_it_is_named(grammars: Grammars) -> None:
    for special in (SPECIAL, ()):
        matcher = grammars.matcher(without(["import"], special))
        for part in ("a b", "c"):
            assert allowed(matcher) & set(SPECIAL) == set(special)
            matcher.advance((*demo_tokenizer().encode(part, add_special_tokens=False), *special))
            assert matcher.error == ""


def test_half_a_character_is_no_word(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match="d800"):
        grammars.matcher(without(["\ud800"], ()))


def test_a_long_answer_stays_within_the_limits(grammars: Grammars) -> None:
    words = [f"word {number} /é" for number in range(100)]
    matcher = grammars.matcher(without(words, SPECIAL))
    text = "def f(x):\n    return x + 1  # word 7 /, word 8 é, 😀\n" * 200
    for token_id in demo_tokenizer().encode(text, add_special_tokens=False):
        matcher.allowed()
        matcher.advance([token_id])
    assert matcher.error == ""
