"""Texts that hold none of some words: which tokens may come next.

    the text so far     .. the impo      ends with beginnings of words: "impo" of "import", "po" of "port"
    forbidden are       tokens that hold a word, as "imports", and those that begin with a rest, as "rt", "rts", "rted"

Where the words stand in the text counts, and not how they are cut into tokens. It is Aho and Corasick's automaton (1975) over
bytes: a node is a beginning of words, and the place of a text is the longest one that it ends with. There are no more of them
than the words have bytes, so nothing can come up in the middle of an answer: the steps of a grammar have limits.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import llguidance
import numpy as np

from jdisagg.core.requests import Grammar, GrammarKind

MAX_BAD_WORDS = 100
MAX_BAD_LENGTH = 128  # characters
_BETWEEN = b"\xff"  # is in no UTF-8
_OF_NO_TOKEN = b"<[%d]>"  # as the library calls an id that the tokenizer does not have


def without(words: Iterable[str]) -> Grammar:
    """The answer may end wherever it likes."""
    return Grammar(GrammarKind.BAD_WORDS, json.dumps(list(words), ensure_ascii=False, separators=(",", ":")))


@dataclass(frozen=True)
class TokenTexts:
    """What each token of a vocabulary writes."""

    by_id: tuple[bytes, ...]  # b"" = nothing
    may_come: np.ndarray  # bool[V]: all that there are; V is a multiple of 32, as whoever takes its bits takes words of them
    texts: list[bytes]  # those that are not empty, sorted
    token_ids: np.ndarray  # i32[len(texts)]: whose they are
    joined: np.ndarray  # u8: the texts, each behind a byte that is in no word, and more of those than a word is long
    begins: np.ndarray  # i64[len(texts)]: where in `joined` each begins


def read_texts(tokenizer: llguidance.LLTokenizer, hidden: Collection[int]) -> TokenTexts:
    """`hidden`: ids of tokens that are not shown, which are no text."""
    read = [tokenizer.decode_bytes([token_id]) for token_id in range(tokenizer.vocab_size)]
    is_there = [token_id in hidden or text != _OF_NO_TOKEN % token_id for token_id, text in enumerate(read)]
    by_id = [b"" if token_id in hidden or not is_there[token_id] else text for token_id, text in enumerate(read)]
    token_ids = sorted((token_id for token_id, text in enumerate(by_id) if text), key=by_id.__getitem__)
    texts = [by_id[token_id] for token_id in token_ids]
    joined = b"".join(_BETWEEN + text for text in texts) + _BETWEEN * (4 * MAX_BAD_LENGTH + 1)
    lengths = np.fromiter((len(text) + 1 for text in texts), np.int64, len(texts))
    return TokenTexts(
        by_id=tuple(by_id),
        may_come=np.pad(np.array(is_there, bool), (0, -len(is_there) % 32)),
        texts=texts,
        token_ids=np.array(token_ids, np.int32),
        joined=np.frombuffer(joined, np.uint8),
        begins=np.cumsum(lengths) - lengths,
    )


class BadWords:
    """Words, for one vocabulary. What it keeps beside them follows from them; it is read by several threads."""

    def __init__(self, text: str, tokens: TokenTexts) -> None:
        """`text`: as `without` writes it. Raises ValueError for another one."""
        self._tokens = tokens
        self._words = _read_words(text)
        self._next: dict[int, int] = {}  # by node << 8 | byte
        self._depth, self._first, self._last = [0], [0], [0]  # by node: bytes of the beginning, and which words begin so
        self._shorter = [0]  # by node: the next shorter beginning that it ends with
        self._complete: set[int] = set()  # nodes that end with a word
        self._rests: dict[int, list[tuple[int, int]]] = {}  # see `_starting`
        self._build()
        self._anywhere = tokens.may_come.copy()  # bool[V]: tokens that hold no word
        self._anywhere[tokens.token_ids[self._holding()]] = False

    def beginning(self) -> WordsMatcher:
        """Of an answer."""
        return WordsMatcher(self)

    def behind(self, node: int, token_id: int) -> int | None:
        """The place of a text of `node` behind one more token; None = it has a word then, or there is no such token."""
        if token_id >= len(self._tokens.by_id) or not self._tokens.may_come[token_id]:
            return None
        for byte in self._tokens.by_id[token_id]:
            node = self._step(node, byte)
            if node in self._complete:
                return None
        return node

    def allowed(self, node: int) -> bytes:
        """Bit t, least significant first: token t may come behind a text of `node`."""
        allowed = self._anywhere.copy()
        while node:
            for begin, end in self._starting(node):
                allowed[self._tokens.token_ids[begin:end]] = False
            node = self._shorter[node]
        return np.packbits(allowed, bitorder="little").tobytes()

    def _step(self, node: int, byte: int) -> int:
        while (found := self._next.get(node << 8 | byte)) is None and node:
            node = self._shorter[node]
        return found or 0

    def _build(self) -> None:
        links: list[tuple[int, int, int]] = []  # node, parent, byte
        for number, word in enumerate(self._words):
            node = 0
            for depth, byte in enumerate(word, 1):
                parent, node = node, self._next.setdefault(node << 8 | byte, len(self._depth))
                if node == len(self._depth):
                    links.append((node, parent, byte))
                    self._depth.append(depth)
                    self._first.append(number)
                    self._last.append(number)
                    self._shorter.append(0)
                self._last[node] = number
            self._complete.add(node)
        for node, parent, byte in sorted(links, key=lambda link: self._depth[link[0]]):
            self._shorter[node] = self._step(self._shorter[parent], byte) if parent else 0
            if self._shorter[node] in self._complete:
                self._complete.add(node)

    def _holding(self) -> np.ndarray:
        """i64: which of the texts have a word in them."""
        joined, begins = self._tokens.joined, self._tokens.begins
        found = list[np.ndarray]()
        for word in self._words:
            places = np.flatnonzero(joined == word[0])
            for offset, byte in enumerate(word[1:], 1):
                if not places.size:
                    break
                places = places[joined[places + offset] == byte]
            found.append(np.searchsorted(begins, places) - 1)
        return np.concatenate(found)

    def _starting(self, node: int) -> list[tuple[int, int]]:
        """Which of the texts start with a rest, of a word that begins as `node` does: [begin, end) each."""
        if (known := self._rests.get(node)) is None:
            words = self._words[self._first[node] : self._last[node] + 1]
            ranges = (self._range(word[self._depth[node] :]) for word in words)
            known = self._rests[node] = [(begin, end) for begin, end in ranges if begin < end]
        return known

    def _range(self, start: bytes) -> tuple[int, int]:
        behind = start[:-1] + bytes([start[-1] + 1])  # no byte of UTF-8 is 255
        begin = bisect_left(self._tokens.texts, start)
        return begin, bisect_left(self._tokens.texts, behind, begin)


class WordsMatcher:
    """One sequence's text. As `jdisagg.text.grammar.Matcher`."""

    def __init__(self, words: BadWords) -> None:
        self._words = words
        self._node = 0
        self.error = ""

    def advance(self, token_ids: Sequence[int]) -> None:
        """These were generated next."""
        for token_id in token_ids:
            node = None if self.error else self._words.behind(self._node, token_id)
            if node is None:
                self.error = self.error or f"behind token {token_id} the text has one of the bad words"
            else:
                self._node = node

    def allowed(self) -> bytes:
        """As bits: the tokens that may come next."""
        return self._words.allowed(self._node)


def _read_words(text: str) -> list[bytes]:
    """Sorted, each once."""
    try:
        words = json.loads(text)
    except RecursionError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) and 0 < len(word) <= MAX_BAD_LENGTH for word in words):
        raise ValueError(f"must be a JSON list of strings of 1 to {MAX_BAD_LENGTH} characters")
    if not 0 < len(words) <= MAX_BAD_WORDS:
        raise ValueError(f"must hold 1 to {MAX_BAD_WORDS} strings; got {len(words)}")
    return sorted({word.encode() for word in words})
