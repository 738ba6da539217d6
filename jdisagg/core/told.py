"""What another process says, fit for our logs, our errors and our clients: short, and nothing in it that a terminal obeys.

Texts pass here where they enter, in the codecs: a peer that is broken may say anything, at any length.
"""

from __future__ import annotations

MOST_CHARACTERS = 500  # the longest of our own errors has about 300


def told(text: str, most: int = MOST_CHARACTERS) -> str:
    """`text` made printable, and cut after `most` characters."""
    return printable(text if len(text) <= most else f"{text[:most]}...")


def printable(text: str) -> str:
    """Control characters and the like as escapes, as in `repr`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
