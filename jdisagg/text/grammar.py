"""Grammars compiled for one tokenizer, and where in its grammar a generated text stands. llguidance does the work, but for
`bad_words`.

    ahead (a thread of whoever takes the request in)      compiled, and held as long as the request is here
    matcher (engine, per sequence)                        a copy of what was kept, moved on by the tokens there are
    allowed -> sample -> advance                          once per token

A matcher's state follows from grammar and tokens alone: whoever goes on with a request makes its own from those.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from weakref import WeakValueDictionary

import llguidance

from jdisagg.core.errors import InvalidRequest, Overloaded, RequestError, Unavailable
from jdisagg.core.requests import Grammar, GrammarKind
from jdisagg.core.told import told
from jdisagg.text.bad_words import BadWords, TokenTexts, WordsMatcher, read_texts
from jdisagg.text.grammar_tokenizer import read_tokenizer
from jdisagg.text.schema_annotations import readable, readable_text
from jdisagg.text.schema_refs import values_in

log = logging.getLogger(__name__)

MOST_KEPT = 64  # compiled grammars that nobody holds; most clients use few, and answers may make each of them 10 MB and more
MOST_TEXT = 2**22  # characters of those that are held, see `_length`: 2 GiB at most
LEAST_LENGTH = 2**13  # characters that each counts as: honest short ones take 1 MiB, and `multipleOf` of a prime many
_BYTES_EACH = 512  # of what is compiled, for a character; 60,000 letters take 400
_MOST_OF_ERROR = 300  # characters
_ROW = "Current row has"  # of `max_items_in_row`
_FEWER = "; of an object of a JSON schema, require more properties, or have fewer properties"
_SCHEMA_ALONE = re.compile(  # behind a thought, as `thoughts` writes it
    r"answer: %json (\{[^\n]*)\nstart: (\(<\[\d+\]> )?<\[\^[\d,-]+\]>\* <\[\d+\]>( /\[ \\n\\r\\t\]\{1,8\}/\?)?(\)\?)? answer"
)
_EBNF = "::="  # stands in no Lark outside of its texts
_IN_LARK = '; this looks like EBNF, which is not served: write it in Lark, as in start: "a" | "b"'
_WHY = "error: "  # where a regular expression cannot be read, the line that says why begins so
_OF_THE_STATES = "lexer error"  # as errors begin that are of what the copies of one grammar share
_MOST_TRIED = 256  # tokens that begin an answer; 100 or so begin with a brace
_QUIET = 0  # llguidance's log level: it would write to stderr


def _limits(most_in_row: int) -> llguidance.LLParserLimits:
    """Of one step, which is in the way of everybody's next token, of memory, and of what is read at once. Compiling has no
    limit that holds: see `grammar_checker`. As many different beginnings as are in a row may follow at one place."""
    return llguidance.LLParserLimits(
        step_lexer_fuel=100_000,  # 7 ms
        step_max_items=50_000,  # 3 ms, of rules that may be empty in many ways 150; honest ones need 15,000 with 130k tokens
        max_items_in_row=most_in_row,
        max_lexer_states=20_000,  # 10 MB, and more of large expressions
        max_grammar_size=100_000,
        verbose_errors=False,
    )


_LIMITS = {
    GrammarKind.JSON_SCHEMA: _limits(1000),  # 4 for each optional property; 10 ms at worst, which 2,000 make 90
    GrammarKind.REGEX: _limits(500),
    GrammarKind.LARK: _limits(500),  # 20 ms, or as above, which 2,000 make 250
}

# Unless the "x-guidance" of a schema says otherwise: so many blanks in a row, as a deep structure's lines have them, and no
# model fills its answer with them; a `oneOf` whose branches may overlap is read as `anyOf`.
_BLANKS: Any = {"whitespace_pattern": r"[ \n\r\t]{1,80}"}
_DEFAULTS: Any = _BLANKS | {"coerce_one_of": True}


def read_schema(text: str) -> str:
    """A schema in the library's own form."""
    return llguidance.LLMatcher.grammar_from_json_schema(readable_text(text), defaults=_DEFAULTS)


def schema_in_lark(schema: dict[str, Any], looks_left: Iterator[int] | None = None) -> dict[str, Any]:
    """As `read_schema` reads it, for a grammar in Lark that has it among others. `looks_left`: as in `readable`."""
    read = readable(schema, looks_left)
    own = read.get("x-guidance", {})
    has_one_of = any("oneOf" in one for one in values_in(read) if isinstance(one, dict))
    defaults = _DEFAULTS if has_one_of else _BLANKS  # in a hundred schemas of one grammar what says nothing is 2 KiB
    return read | {"x-guidance": defaults | own} if isinstance(own, dict) else read  # anything else the library refuses


_READERS = {
    GrammarKind.JSON_SCHEMA: read_schema,
    GrammarKind.REGEX: llguidance.LLMatcher.grammar_from_regex,
    GrammarKind.LARK: llguidance.LLMatcher.grammar_from_lark,
}


@dataclass(frozen=True)
class Vocabulary:
    """What grammars are compiled for: the text of a tokenizer.json, of at most `size` tokens."""

    tokenizer_json: str
    size: int
    eos_token_ids: tuple[int, ...]
    special_ids: tuple[int, ...]  # of tokens that are no text, beside those


@dataclass(eq=False)
class Compiled:
    """A grammar at its beginning. Who holds this has no other compiled."""

    matcher: llguidance.LLMatcher | BadWords


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
        return _short(error)

    def advance(self, token_ids: Sequence[int]) -> None:
        """These were generated next. One that does not fit shows as `error`."""
        for token_id in token_ids:  # all at once, the library would not take an EOS behind the grammar's end
            self._matcher.consume_token(token_id)

    def allowed(self) -> bytes:
        """Bit t of these, least significant first: token t may come next. EOS may where the grammar may end. At least the
        vocabulary's bits; meaningless when it leaves an `error`."""
        return self._matcher.compute_bitmask()


class Grammars:
    """Compiled grammars: the latest ones, and those that somebody holds. Any thread."""

    def __init__(self, vocabulary: Vocabulary, most_kept: int = MOST_KEPT) -> None:
        """Raises ValueError when the library cannot read the tokenizer."""
        self.vocabulary = vocabulary
        self._most_kept = most_kept
        self._lock = threading.Lock()  # of those below but `_tokenizer`
        self._tokenizer = read_tokenizer(vocabulary.tokenizer_json, vocabulary.size, vocabulary.eos_token_ids)
        self._there = WeakValueDictionary[Grammar, Compiled]()
        self._kept: dict[Grammar, Compiled] = {}
        self._renewing: set[Grammar] = set()
        self._compiling: dict[Grammar, asyncio.Task[Compiled]] = {}  # ahead

    @cached_property
    def _texts(self) -> TokenTexts:  # of 150,000 tokens in 0.3 s, for the first who needs them
        return read_texts(self._tokenizer, {*self.vocabulary.eos_token_ids, *self.vocabulary.special_ids})

    async def ahead(self, grammar: Grammar) -> Compiled:
        """While this is held, `matcher` takes no time for it. Raises as `compile` does, Overloaded while too much is held,
        Unavailable where no thread is left, and RequestError when something else is in the way, which is logged. From one event
        loop: who wants the same one at once waits for the same thread."""
        if (held := self._find(grammar)) is not None:
            return held
        if (compiling := self._compiling.get(grammar)) is None:
            compiling = self._compiling[grammar] = asyncio.ensure_future(asyncio.to_thread(self._compile_by_name, grammar))
            compiling.add_done_callback(partial(self._compiled, grammar))
        try:
            held = await asyncio.shield(compiling)
        except RuntimeError as error:
            raise Unavailable(f"grammar ({grammar.kind.value}): no thread is left to compile it: {error}") from error
        with self._lock:
            if _length(self._there) > MOST_TEXT:
                self._kept.pop(grammar, None)
                raise Overloaded("the grammars of the requests under way are too long in all; send the request again")
        return held

    def _compiled(self, grammar: Grammar, compiling: asyncio.Task[Compiled]) -> None:
        del self._compiling[grammar]
        if not compiling.cancelled():
            compiling.exception()  # who waited may have gone, and asyncio logs what nobody was told

    def matcher(self, grammar: Grammar) -> Matcher | WordsMatcher:
        """At the grammar's beginning. Raises as `compile` does."""
        held = self.compile(grammar)
        latest = held.matcher
        if isinstance(latest, BadWords):
            return latest.beginning()
        return Matcher(latest.deep_copy(), partial(self._renew, grammar, held, latest))

    def compile(self, grammar: Grammar) -> Compiled:
        """Kept for later. Raises InvalidRequest when it is no grammar, or nothing is of it; one that nobody has checked may
        take for ever, or end the process."""
        found = self._find(grammar) or Compiled(self._compile(grammar))
        with self._lock:
            found = self._there.setdefault(grammar, found)
            self._kept.pop(grammar, None)
            self._kept[grammar] = found  # the newest again
            while len(self._kept) > self._most_kept or _length(self._kept) > MOST_TEXT / 2:
                del self._kept[next(iter(self._kept))]
        return found

    def _find(self, grammar: Grammar) -> Compiled | None:
        with self._lock:  # to read it takes out who has gone, for which nobody may be going through it
            return self._there.get(grammar)

    def _compile_by_name(self, grammar: Grammar) -> Compiled:
        """As `compile`; whatever else is in the way is a RequestError. For a thread in which nothing else can end."""
        try:
            return self.compile(grammar)
        except RequestError:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            log.exception("a grammar (%s, %d characters) could not be compiled", grammar.kind.value, len(grammar.text))
            raise RequestError(f"grammar ({grammar.kind.value}): could not be compiled: {told(repr(error))}") from error

    def _renew(self, grammar: Grammar, held: Compiled, full: llguidance.LLMatcher) -> None:
        """Copies share the states that their texts have led to, and the limit of those: soon it has another, which has none.
        Whoever comes before that has the old one, as an engine's thread is not to wait for a compiler."""
        with self._lock:
            if held.matcher is not full or grammar in self._renewing:
                return
            self._renewing.add(grammar)
        try:
            threading.Thread(target=self._replace, args=(grammar, held), name="renew-grammar").start()
        except RuntimeError:  # the machine has no thread left; the next one asks again
            with self._lock:
                self._renewing.discard(grammar)

    def _replace(self, grammar: Grammar, held: Compiled) -> None:
        try:
            with suppress(InvalidRequest):
                held.matcher = self._compile(grammar)
        finally:
            with self._lock:
                self._renewing.discard(grammar)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher | BadWords:
        try:
            if grammar.kind is GrammarKind.BAD_WORDS:
                return BadWords(grammar.text, self._texts)
            read = _READERS[grammar.kind](grammar.text)
            matcher = llguidance.LLMatcher(self._tokenizer, read, log_level=_QUIET, limits=_limits_of(grammar))
            first = matcher.compute_bitmask()  # of every sequence: what it finds is kept, too
            error = matcher.get_error() or self._ends_at_once(matcher, first)
        except ValueError as refused:
            error = str(refused)
        else:
            if not error:
                return matcher
        hint = _IN_LARK if grammar.kind is GrammarKind.LARK and _EBNF in grammar.text else ""
        raise InvalidRequest(f"grammar ({grammar.kind.value}): {_short(error)}{hint}", field="grammar")

    def _ends_at_once(self, matcher: llguidance.LLMatcher, first: bytes) -> str:
        """What every answer meets behind its first token, whichever of the `first` allowed that is; "" = some go on."""
        error, bits = "", int.from_bytes(first, "little")
        if bits.bit_count() > _MOST_TRIED:
            return ""
        while bits:
            token_id = (bits & -bits).bit_length() - 1
            further = matcher.deep_copy()
            further.consume_token(token_id)
            further.compute_bitmask()
            if not (error := further.get_error()):
                return ""
            bits &= bits - 1
        return error


def _limits_of(grammar: Grammar) -> llguidance.LLParserLimits:
    """Those of its kind; a schema's are those of a schema, also behind a thought."""
    found = _SCHEMA_ALONE.fullmatch(grammar.text) if grammar.kind is GrammarKind.LARK else None
    with suppress(ValueError):  # what else a client may have written there
        if found is not None and json.loads(found[1]):
            return _LIMITS[GrammarKind.JSON_SCHEMA]
    return _LIMITS[grammar.kind]


def most_bytes(grammar: Grammar) -> int:
    """Compiled, it may take so much memory; one that takes more is refused where it is checked."""
    return _BYTES_EACH * _length((grammar,))


def _length(grammars: Iterable[Grammar]) -> int:
    return sum(max(len(grammar.text), LEAST_LENGTH) for grammar in grammars)


def _short(error: str) -> str:
    """In one line: the first says what, one of those that follow says why; the others show where."""
    if error.startswith("NoExtension"):
        return "no text of this model's tokens is of it"
    first, *others = error.split("\n")
    why = next((line.removeprefix(_WHY) for line in others if line.startswith(_WHY)), "")
    return told(" ".join(filter(None, (first, why))), _MOST_OF_ERROR) + (_FEWER if _ROW in error else "")
