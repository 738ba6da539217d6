"""Any text but one that holds one of some words, as a grammar.

Where the words stand in the text counts, and not how they are cut into tokens. A token that could still become a word is
allowed, the one that would complete it is not.
"""

from __future__ import annotations

from collections.abc import Iterable

from jdisagg.core.requests import Grammar, GrammarKind


def without(words: Iterable[str], special_ids: Iterable[int]) -> Grammar:
    """The answer may end wherever it likes. `special_ids`: of tokens that are not text, which may stand anywhere in it."""
    text = f"TEXT: /(?s:.+)/ & ~/(?s:.*)({'|'.join(map(literal, words))})(?s:.*)/"
    if special := ",".join(map(str, sorted(special_ids))):
        return Grammar(GrammarKind.LARK, f"start: TEXT? (<[{special}]> TEXT?)*\n{text}")
    return Grammar(GrammarKind.LARK, f"start: TEXT?\n{text}")


def literal(text: str) -> str:
    """A regular expression of it alone."""
    return "".join(char if char.isalnum() or char in " _" else f"\\x{{{ord(char):x}}}" for char in text)
