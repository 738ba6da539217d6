"""Grammars compiled for one tokenizer, and where in its grammar a generated text stands. llguidance does the work.

    compile (a thread of whoever takes the request in)    kept for later
    matcher (engine, per sequence)                        a copy of what was kept, moved on by the tokens there are
    allowed -> sample -> advance                          once per token

A matcher's state follows from grammar and tokens alone: whoever goes on with a request makes its own from those.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import llguidance

from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Grammar, GrammarKind
from jdisagg.core.told import told
from jdisagg.text.grammar_tokenizer import read_tokenizer

MOST_KEPT = 64  # compiled grammars; most clients use few, and answers may make each of them 10 MB and more
_MOST_OF_ERROR = 300  # characters
_ROW = "Current row has"  # of `max_items_in_row`
_FEWER = "; of an object of a JSON schema, require more properties, or have fewer properties"
_EBNF = "::="  # stands in no Lark outside of its texts
_IN_LARK = '; this looks like EBNF, which is not served: write it in Lark, as in start: "a" | "b"'
_WHY = "error: "  # where a regular expression cannot be read, the line that says why begins so
_OF_THE_STATES = "lexer error"  # as errors begin that are of what the copies of one grammar share
_QUIET = 0  # llguidance's log level: it would write to stderr

# Of one step, which is in the way of everybody's next token, of memory, and of what is read at once. Compiling has no limit
# that holds: see `grammar_checker`.
_LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=100_000,  # 7 ms
    step_max_items=50_000,  # 3 ms
    max_items_in_row=500,  # 20 ms, which 2,000 make 250; as many different beginnings may follow at one place
    max_lexer_states=20_000,  # 10 MB, and more of large expressions
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

    def __init__(self, matcher: llguidance.LLMatcher, on_full: Callable[[], None]) -> None:
        """`on_full` is called, maybe often, once there is no room for the states of its text."""
        self._matcher = matcher
        self._on_full = on_full

    @property
    def error(self) -> str:
        """Why it cannot go on: a token did not fit, or a limit of the library was met. "" = it can."""
        error = self._matcher.get_error()
        if error.startswith(_OF_THE_STATES):
            self._on_full()
        return _short(error) + (_FEWER if _ROW in error else "")

    def advance(self, token_ids: Sequence[int]) -> None:
        """These were generated next. One that does not fit shows as `error`."""
        for token_id in token_ids:  # all at once, the library would not take an EOS behind the grammar's end
            self._matcher.consume_token(token_id)

    def allowed(self) -> bytes:
        """Bit t of these, least significant first: token t may come next. EOS may where the grammar may end. At least the
        vocabulary's bits; meaningless when it leaves an `error`."""
        return self._matcher.compute_bitmask()


class Grammars:
    """Compiled grammars, the latest ones. Any thread."""

    def __init__(self, vocabulary: Vocabulary, most_kept: int = MOST_KEPT) -> None:
        """Raises ValueError when the library cannot read the tokenizer."""
        self.vocabulary = vocabulary
        self._most_kept = most_kept
        self._lock = threading.Lock()  # of `_kept` and `_renewing`
        self._tokenizer = read_tokenizer(vocabulary.tokenizer_json, vocabulary.size, vocabulary.eos_token_ids)
        self._kept: dict[Grammar, llguidance.LLMatcher] = {}
        self._renewing: set[Grammar] = set()

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
        kept = self.compile(grammar)
        return Matcher(kept.deep_copy(), partial(self._renew, grammar, kept))

    def compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        """Kept for later. Raises as `matcher`; one that nobody has checked may take for ever, or end the process."""
        kept = self._kept.get(grammar) or self._compile(grammar)
        with self._lock:
            self._kept.pop(grammar, None)
            self._kept[grammar] = kept  # the newest again
            while len(self._kept) > self._most_kept:
                del self._kept[next(iter(self._kept))]
        return kept

    def _renew(self, grammar: Grammar, kept: llguidance.LLMatcher) -> None:
        """Copies share the states that their texts have led to, and the limit of those: soon another is kept, which has none.
        Whoever comes before that has the old one, as an engine's thread is not to wait for a compiler."""
        with self._lock:
            if self._kept.get(grammar) is not kept or grammar in self._renewing:
                return
            self._renewing.add(grammar)
        threading.Thread(target=self._replace, args=(grammar, kept), name="renew-grammar").start()

    def _replace(self, grammar: Grammar, kept: llguidance.LLMatcher) -> None:
        new = None
        try:
            with suppress(InvalidRequest):
                new = self._compile(grammar)
        finally:
            with self._lock:
                self._renewing.discard(grammar)
                if new is not None and self._kept.get(grammar) is kept:
                    self._kept[grammar] = new

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
        hint = _IN_LARK if grammar.kind is GrammarKind.LARK and _EBNF in grammar.text else ""
        raise InvalidRequest(f"grammar ({grammar.kind.value}): {_short(error)}{hint}", field="grammar")


def _short(error: str) -> str:
    """In one line: the first says what, one of those that follow says why; the others show where."""
    if error.startswith("NoExtension"):
        return "no text of this model's tokens is of it"
    first, *others = error.split("\n")
    why = next((line.removeprefix(_WHY) for line in others if line.startswith(_WHY)), "")
    return told(" ".join(filter(None, (first, why))), _MOST_OF_ERROR)
