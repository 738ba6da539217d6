"""What another process says, fit for our logs, our errors and our clients: short, and nothing in it that a terminal obeys.

Texts pass here where they enter, in the codecs: a peer that is broken may say anything, at any length.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_CHARACTERS = 500  # the longest of our own errors has about 300
MOST_NAMED = 4  # of many of whom the same is to be said


def told(text: str, most: int = MOST_CHARACTERS) -> str:
    """`text` made printable, and cut after `most` characters."""
    return printable(text if len(text) <= most else f"{text[:most]}...")


def few_of(texts: Sequence[str], separator: str) -> str:
    """`texts` in one, of many the first few and how many there are besides: a large fleet fails as a whole, and every request
    that this fails tells of it."""
    rest = len(texts) - MOST_NAMED
    return separator.join(texts if rest <= 0 else (*texts[:MOST_NAMED], f"{rest} more"))


def printable(text: str) -> str:
    """Control characters and the like as escapes, as in `repr`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
