"""Answers of models, read at once or in pieces."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise

from jdisagg.text.calls.formats import FORMATS
from jdisagg.text.calls.reader import Called, CallReader, Piece, Said

NAMES = frozenset({"f", "get-2"})
Read = tuple[str, list[tuple[str, str]]]  # text, and calls with their arguments


def read(name: str, text: str, cuts: Iterable[int] = (), hidden: Collection[str] = ()) -> Read:
    """By the format of that name."""
    reader, edges = CallReader(FORMATS[name], NAMES, hidden), [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [piece for begin, end in pairwise(edges) for piece in reader.push(text[begin:end])]
    return joined(pieces + reader.flush())


def joined(pieces: Iterable[Piece]) -> Read:
    """What they add up to."""
    said, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        match piece:
            case Said(text):
                said += text
            case Called(name):
                calls.append((name, ""))
            case _:
                calls[-1] = calls[-1][0], calls[-1][1] + piece.text
    return said, calls
