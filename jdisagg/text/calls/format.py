"""What a format of tool calls is: one class in a file of its own, and a row of `formats.FORMATS`.

A format says where a call may begin and recognises its head, everything before its arguments. `reader` does the rest: it passes
text on, follows the arguments to their end, and takes what stands between calls away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol


class Verdict(Enum):
    """On what may be the beginning of a call."""

    WAIT = auto()  # it needs more text
    REST = auto()  # it needs all of its object, and is not asked again before that
    TEXT = auto()  # it is none


@dataclass(frozen=True, slots=True)
class Head:
    """A call has begun. Unless `arguments` are there, they begin with the last character of what was looked at, a brace."""

    name: str
    is_wrapped: bool = True  # the arguments are a value of an object, which ends behind them
    arguments: str | None = None


class CallFormat(Protocol):
    """How a model writes calls. All texts are non-empty; those that are special tokens are found, too."""

    marks: tuple[str, ...]  # where one stands a call may begin, or has ended
    inner: tuple[str, ...]  # further texts that only belong into heads
    glue: tuple[str, ...]  # what may stand behind a call and is no text
    opens_bare: bool  # an answer may begin with a call that has no mark

    def look(self, held: str, *, is_whole: bool) -> Head | Verdict:
        """`held` begins with a mark; without one, it is the beginning of an answer, if that may be bare, or a brace and what
        follows it stand behind a call. It is asked after each character, and no more after another answer than WAIT, or REST:
        so it is not to take longer for a longer text. `is_whole`: the last character ends the object that began first."""
        ...


class ModelFormat(CallFormat, Protocol):
    """One that models have of their own accord, beside text: a row of `formats.FORMATS`."""

    arguments_key: str  # of the object that a call is

    def rules(self, names: Sequence[str], mark: Callable[[str], str], *, in_parallel: bool) -> list[str]:
        """Lines of a grammar in which `calls` is an answer of calls alone, of any number, or one unless `in_parallel`; `call`,
        which it is made of, is the object of one, `object` that of arguments, and BLANKS some. `mark`: a text of the format as
        grammars have it. Whatever is of it the format reads as calls."""
        ...
