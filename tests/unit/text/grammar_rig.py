"""Grammars over real tokenizers, their bits read as sets, and answers that the grammar alone chooses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import llguidance
import pytest

import jdisagg
from jdisagg.core.requests import Grammar, GrammarKind
from jdisagg.engine.grammar_rows import Matcher
from jdisagg.models.resolve import eos_token_ids
from jdisagg.text.bad_words import BadWords
from jdisagg.text.grammar import Grammars, Vocabulary
from jdisagg.text.tokenizer import Tokenizer

DEMO = Path(jdisagg.__file__).parent / "demo"

# More than the tables of one grammar hold: the states of its texts are exponentially many.
GREEDY = "(.*a.*b.*c.*d.*e.{5,40}){3}"


@lru_cache(maxsize=1)
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(DEMO)


def vocabulary(tokenizer: Tokenizer, eos: tuple[int, ...], size: int | None = None) -> Vocabulary:
    return Vocabulary(tokenizer.to_json(), size or tokenizer.vocab_size, eos, tuple(tokenizer.special_ids))


@lru_cache(maxsize=1)
def demo_vocabulary() -> Vocabulary:
    return vocabulary(demo_tokenizer(), eos_token_ids(DEMO))


def demo_grammars() -> Grammars:
    """Anew: nothing is kept."""
    return Grammars(demo_vocabulary())


def is_there(grammars: Grammars, grammar: Grammar) -> bool:
    """It was compiled lately, or is held."""
    return grammar in grammars._there


def failing(monkeypatch: pytest.MonkeyPatch, grammars: Grammars, text: str, error: BaseException) -> None:
    """From now on the library raises `error` for that one."""
    compile_ = grammars._compile

    def compile_or_fail(grammar: Grammar) -> llguidance.LLMatcher | BadWords:
        if grammar.text == text:
            raise error
        return compile_(grammar)

    monkeypatch.setattr(grammars, "_compile", compile_or_fail)


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def schema(text: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


def allowed(matcher: Matcher) -> set[int]:
    """The tokens that may come next."""
    bits = matcher.allowed()
    return {token_id for token_id in range(8 * len(bits)) if bits[token_id // 8] >> token_id % 8 & 1}


def advanced(grammars: Grammars, grammar: Grammar, token_ids: Sequence[int]) -> Matcher:
    """One that has been told of all of them at once, as a replay's is."""
    matcher = grammars.matcher(grammar)
    matcher.advance(token_ids)
    return matcher


def walk(matcher: Matcher, eos: tuple[int, ...], seed: int, most: int = 60) -> list[int]:
    """An answer of at most so many tokens, each one of those allowed, up to an EOS, which is taken where there is no other."""
    chosen, token_ids = random.Random(seed), list[int]()
    while len(token_ids) < most and not (token_ids and token_ids[-1] in eos):
        choices = sorted(allowed(matcher))
        assert choices, matcher.error
        token_ids.append(chosen.choice(choices))
        matcher.advance(token_ids[-1:])
        assert matcher.error == ""
    return token_ids


def text_of(tokenizer: Tokenizer, token_ids: list[int], eos: tuple[int, ...]) -> str:
    return tokenizer.decode([token_id for token_id in token_ids if token_id not in eos])
