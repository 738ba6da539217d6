"""Marks in text that comes in pieces."""

from __future__ import annotations


def num_begun(text: str, mark: str) -> int:
    """The most characters that `text` ends and `mark` begins with, fewer than all of it."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)
