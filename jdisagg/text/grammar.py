"""Grammars compiled for one tokenizer, and where in its grammar a generated text stands. llguidance does the work.

    compile (a thread of whoever takes the request in)    kept for later
    matcher (engine, per sequence)                        a copy of what was kept, moved on by the tokens there are
    allowed -> sample -> advance                          once per token

A matcher's state follows from grammar and tokens alone: whoever goes on with a request makes its own from those.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import llguidance

from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Grammar, GrammarKind
from jdisagg.core.told import told

MOST_KEPT = 256  # compiled grammars; most clients use few
_MOST_OF_ERROR = 300  # characters
_QUIET = 0  # llguidance's log level: it would write to stderr

# Of one step, which is in the way of everybody's next token, of memory, and of what is read at once. Compiling has no limit
# that holds: see `grammar_checker`.
_LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=100_000,  # 7 ms
    step_max_items=50_000,  # 3 ms
    max_lexer_states=50_000,  # 100 MB
    max_grammar_size=100_000,
    verbose_errors=False,
)

# Blanks of JSON in a row: lines of a deep structure have as many, and no model fills its answer with them.
_BLANKS = r"[ \n\r\t]{1,80}"

_READERS = {
    GrammarKind.JSON_SCHEMA: partial(llguidance.LLMatcher.grammar_from_json_schema, defaults={"whitespace_pattern": _BLANKS}),
    GrammarKind.REGEX: llguidance.LLMatcher.grammar_from_regex,
    GrammarKind.LARK: llguidance.LLMatcher.grammar_from_lark,
}


@dataclass(frozen=True)
class Vocabulary:
    """What grammars are compiled for: the text of a tokenizer.json, of at most `size` tokens."""

    tokenizer_json: str
    size: int
    eos_token_ids: tuple[int, ...]


class Matcher:
    """One sequence's place in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str:
        """Why it cannot go on: a token did not fit, or a limit of the library was met. "" = it can."""
        return _short(self._matcher.get_error())

    def advance(self, token_ids: Sequence[int]) -> None:
        """These were generated next. One that does not fit shows as `error`."""
        for token_id in token_ids:  # all at once, the library would not take an EOS behind the grammar's end
            self._matcher.consume_token(token_id)

    def allowed(self) -> bytes:
        """Bit t of these, least significant first: token t may come next. EOS may where the grammar may end. At least the
        vocabulary's bits; meaningless when it leaves an `error`."""
        return self._matcher.compute_bitmask()


class Grammars:
    """Compiled grammars, the latest MOST_KEPT. Any thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises ValueError when the library cannot read the tokenizer."""
        self.vocabulary = vocabulary
        self._tokenizer = llguidance.LLTokenizer(
            vocabulary.tokenizer_json, n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_token_ids)
        )
        self._kept: dict[Grammar, llguidance.LLMatcher] = {}

    def has(self, grammar: Grammar) -> bool:
        """Whether it was compiled lately."""
        return grammar in self._kept

    async def ahead(self, grammar: Grammar) -> None:
        """Have `matcher` take no time for it. What is wrong with it, `matcher` says."""
        if not self.has(grammar):
            with suppress(InvalidRequest):
                await asyncio.to_thread(self.compile, grammar)

    def matcher(self, grammar: Grammar) -> Matcher:
        """At the grammar's beginning. Raises InvalidRequest when it is none, or nothing is of it."""
        return Matcher(self.compile(grammar).deep_copy())

    def compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        """Kept for later. Raises as `matcher`; one that nobody has checked may take for ever, or end the process."""
        if (kept := self._kept.pop(grammar, None)) is None:
            kept = self._compile(grammar)
        self._kept[grammar] = kept  # the newest again
        while len(self._kept) > MOST_KEPT:
            self._kept.pop(next(iter(self._kept)), None)
        return kept

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        try:
            read = _READERS[grammar.kind](grammar.text)
            matcher = llguidance.LLMatcher(self._tokenizer, read, log_level=_QUIET, limits=_LIMITS)
            matcher.compute_bitmask()  # the first of every sequence: what it finds is kept, too
            error = matcher.get_error()
        except ValueError as refused:
            error = str(refused)
        else:
            if not error:
                return matcher
        raise InvalidRequest(f"grammar ({grammar.kind.value}): {_short(error)}", field="grammar")


def _short(error: str) -> str:
    """The first line, which says what; what follows shows where, in several."""
    if error.startswith("NoExtension"):
        return "no text of this model's tokens is of it"
    return told(error.partition("\n")[0], _MOST_OF_ERROR)
