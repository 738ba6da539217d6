"""Whether a process serves requests with a grammar: decided once, and said where it does not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

import jdisagg
from jdisagg.core.requests import Grammar, GrammarKind
from jdisagg.models.resolve import eos_token_ids
from jdisagg.serve.grammars import grammars_of
from jdisagg.text.bad_words import without
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.text.grammar_rig import allowed, demo_tokenizer

DEMO = Path(jdisagg.__file__).parent / "demo"
REFUSED = "requests with a grammar are refused here: "


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    """What one test has read is not there for the next."""
    grammars_of.cache_clear()
    yield
    grammars_of.cache_clear()


def test_the_demo_serves_them_and_both_engines_of_a_process_have_the_same_object(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tokenizer, eos = demo_tokenizer(), eos_token_ids(DEMO)
    one = grammars_of(tokenizer, tokenizer.vocab_size, eos)
    assert one is not None
    assert one is grammars_of(tokenizer, tokenizer.vocab_size, eos)
    assert caplog.text.count("tokenizer read in") == 1
    assert REFUSED not in caplog.text
    matcher = one.matcher(Grammar(GrammarKind.REGEX, "a"))
    matcher.advance(tokenizer.encode("a", add_special_tokens=False))
    assert allowed(matcher) == set(eos)


def test_the_special_tokens_are_known_which_are_no_text() -> None:
    grammars = grammars_of(demo_tokenizer(), demo_tokenizer().vocab_size, eos_token_ids(DEMO))
    assert grammars is not None
    assert allowed(grammars.matcher(without(["<|system|>"]))) >= demo_tokenizer().special_ids


@pytest.mark.parametrize(
    ("has_tokenizer", "eos", "why"),
    [
        (False, (1,), "there is no tokenizer.json"),
        (False, (), "there is no tokenizer.json"),
        (True, (), "the model names no EOS token, with which an answer would end"),
        (True, (4096, 5000), "the model names no EOS token, with which an answer would end"),
    ],
)
def test_without_a_tokenizer_or_an_eos_they_are_refused_and_the_log_says_why_once(
    has_tokenizer: bool, eos: tuple[int, ...], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert grammars_of(demo_tokenizer() if has_tokenizer else None, 4096, eos) is None
    assert [record.getMessage() for record in caplog.records] == [f"{REFUSED}{why}"]


def test_a_tokenizer_that_the_library_cannot_read_is_no_reason_not_to_start(caplog: pytest.LogCaptureFixture) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "##b": 2, "[SEP]": 3}, unk_token="[UNK]"))
    assert grammars_of(Tokenizer(backend, {}), 4, (3,)) is None
    (record,) = caplog.records
    assert record.getMessage().startswith(REFUSED)
    assert record.getMessage() != REFUSED
    assert record.getMessage().isprintable()


def test_an_eos_that_the_model_does_not_have_is_none_and_the_others_are(caplog: pytest.LogCaptureFixture) -> None:
    grammars = grammars_of(demo_tokenizer(), 4096, (5, 4096))
    assert grammars is not None
    assert grammars.vocabulary.eos_token_ids == (5,)
    assert caplog.records == []


@pytest.mark.parametrize(("vocab_size", "size"), [(1, 4096), (4096, 4096), (5000, 5000)])
def test_the_bits_are_as_many_as_the_model_or_its_tokenizer_has_tokens(vocab_size: int, size: int) -> None:
    grammars = grammars_of(demo_tokenizer(), vocab_size, (0,))
    assert grammars is not None
    assert grammars.vocabulary.size == size
    assert 8 * len(grammars.matcher(Grammar(GrammarKind.REGEX, "a")).allowed()) >= size
