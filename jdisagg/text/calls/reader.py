"""Finds the calls in an answer whose text comes in pieces.

    text --a mark--> head --a name that is offered, and the brace of its arguments--> arguments --its end--> behind --> text

A head is looked at after each character that may decide, so what is found does not depend on how the text was cut. Once it is
whole the call is one, whatever comes: arguments go out as the model writes them and may end before their end, or be no JSON. A
head that turns out to be none goes out as text. Blanks before a call and around it are no text: templates write their own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from jdisagg.text.calls.braces import Braces
from jdisagg.text.calls.format import CallFormat, Head, Verdict
from jdisagg.text.marks import num_begun

MOST_HELD = 16384  # characters of a head; more are text
_AT_ONCE = 1024  # characters that are read together: what is left of them is copied at each mark
_MOST_BLANKS = 64  # that are held back before a call


@dataclass(frozen=True, slots=True)
class Said:
    """Text."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A call begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """A piece of the arguments of the latest call."""

    text: str


Piece = Said | Called | Argued


class _At(Enum):
    TEXT = auto()
    HEAD = auto()
    LONG_HEAD = auto()  # its end decides
    ARGUMENTS = auto()
    REST = auto()  # further keys of the object that a call is
    BEHIND = auto()


class CallReader:
    """Of one answer."""

    def __init__(self, call_format: CallFormat, names: Collection[str], hidden: Collection[str] = ()) -> None:
        """`names`: of the functions that are offered. `hidden`: those of the format's marks that are no text, being special
        tokens that the client does not want to see."""
        self._format = call_format
        self._names = names
        self._hidden = hidden
        self._tokens = (*call_format.marks, *call_format.inner)
        self._at = _At.HEAD if call_format.opens_bare else _At.TEXT
        self._blanks = ""  # not yet said
        self._held = ""  # behind them: what is not yet decided
        self._braces = Braces()
        self._is_wrapped = False  # the object that the latest call is has not ended
        self._pieces: list[Piece] = []

    @property
    def is_in_call(self) -> bool:
        """The arguments of the latest call have not ended."""
        return self._at is _At.ARGUMENTS

    def push(self, text: str) -> list[Piece]:
        """What `text` adds."""
        for begin in range(0, len(text), _AT_ONCE):
            part = text[begin : begin + _AT_ONCE]
            while part:
                part = self._read(part)
        return self._taken()

    def flush(self) -> list[Piece]:
        """What is left at the end of the answer. What stands between a call and its end is dropped."""
        if self._at in (_At.TEXT, _At.HEAD, _At.LONG_HEAD):
            held = self._held
            for mark in self._hidden:
                held = held.replace(mark, "")
            self._pieces.append(Said(self._blanks + held))
            self._blanks = self._held = ""
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return [piece for piece in pieces if isinstance(piece, Called) or piece.text]

    def _read(self, text: str) -> str:
        """Takes the beginning of `text` and returns what is left of it."""
        match self._at:
            case _At.TEXT:
                return self._read_text(text)
            case _At.HEAD:
                return self._read_head(text)
            case _At.LONG_HEAD:
                return self._read_long_head(text)
            case _At.ARGUMENTS:
                return self._read_arguments(text)
            case _At.REST:
                return self._read_rest(text)
            case _At.BEHIND:
                return self._read_behind(text)

    def _read_text(self, text: str) -> str:
        text = self._held + text
        begins = [(begin, token) for token in self._tokens if (begin := text.find(token)) >= 0]
        if begins:
            end, self._held = min(begins)
            rest = text[end + len(self._held) :]
            self._at, self._braces = _At.HEAD, Braces()
        else:
            end, rest = len(text) - max(num_begun(text, token) for token in self._tokens), ""
            self._held = text[end:]
        said = self._blanks + text[:end]
        keep = min(len(said) - len(said.rstrip()), _MOST_BLANKS)
        self._blanks = said[len(said) - keep :]
        self._pieces.append(Said(said[: len(said) - keep]))
        return rest

    def _read_head(self, text: str) -> str:
        for index in range(len(text)):
            self._braces.end(text[index])
            left = self._look(text[index])
            if self._at is not _At.HEAD:
                return left + text[index + 1 :]
        return ""

    def _read_long_head(self, text: str) -> str:
        part = text
        for mark in self._format.marks:
            begun = self._held[max(1, len(self._held) - len(mark) + 1) :]
            if (begin := (begun + part).find(mark)) >= 0:
                part = part[: begin + len(mark) - len(begun)]
        part = part[: self._braces.end(part)]
        return self._look(part) + text[len(part) :]

    def _look(self, part: str) -> str:
        """At the head with `part` behind it, whose last character is the first that may decide. Returns what of it is to be
        read again."""
        self._held += part
        is_whole = part[-1] == "}" and self._braces.depth == 0
        is_over = len(self._held) > MOST_HELD or self._held.endswith(self._format.marks, 1)
        head = Verdict.TEXT if is_over else self._format.look(self._held, is_whole=is_whole)
        if isinstance(head, Head) and head.name in self._names:
            self._begin(head)
            return part[-1] if head.arguments is None else ""
        if head is Verdict.REST:
            self._at = _At.LONG_HEAD
        elif head is not Verdict.WAIT:
            return self._begun_text()
        return ""

    def _begin(self, head: Head) -> None:
        self._blanks = self._held = ""
        self._braces, self._is_wrapped = Braces(), head.is_wrapped
        self._pieces.append(Called(head.name))
        self._at = _At.ARGUMENTS
        if head.arguments is not None:
            self._pieces.append(Argued(head.arguments))
            self._at = _At.BEHIND

    def _begun_text(self) -> str:
        """It is no call: its first mark, or character, is said, and the rest is to be read as text."""
        first = next((token for token in self._tokens if self._held.startswith(token)), self._held[:1])
        rest, self._held = self._held[len(first) :], ""
        self._at = _At.TEXT
        if first.isspace():
            self._blanks += first
        elif first not in self._hidden:
            self._pieces.append(Said(self._blanks + first))
            self._blanks = ""
        return rest

    def _read_arguments(self, text: str) -> str:
        end = self._braces.end(text)
        self._pieces.append(Argued(text[:end]))
        if self._braces.depth == 0:
            self._at = _At.BEHIND
        return text[end:]

    def _read_rest(self, text: str) -> str:
        end = self._braces.end(text)
        if self._braces.depth == 0:
            self._at, self._is_wrapped = _At.BEHIND, False
        return text[end:]

    def _read_behind(self, text: str) -> str:
        for index, character in enumerate(text, start=1):
            held = self._held + character
            if held.isspace():
                self._blanks += character
            elif held in self._format.glue and not (held == "," and self._is_wrapped):
                self._blanks = self._held = ""
            elif held == "}" and self._is_wrapped:
                self._blanks, self._is_wrapped = "", False
            elif held == "," and self._is_wrapped:
                self._at, self._braces = _At.REST, Braces(1)
                return text[index:]
            elif any(glue.startswith(held) for glue in self._format.glue):
                self._held = held
            elif held == "{":
                self._at, self._held, self._braces = _At.HEAD, held, Braces(1)
                return text[index:]
            else:
                self._at, self._held = _At.TEXT, ""
                return held + text[index:]
        return ""
