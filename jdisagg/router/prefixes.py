"""Which workers had a prompt that begins as this one does: their prefix caches may have it still.

A prompt is remembered by the digests of its beginnings of 1, 2, 3, .. 32, 34, .. 64, 68, .. 128, 136, .. blocks: sixteen for
each doubling of the length. So of what any two prompts have in common, at least 16/17 of the whole blocks is found, wherever it
ends: behind a system prompt, an example, a document, a turn of a chat. A prompt of 120,000 tokens has 141 of them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

BLOCK_TOKENS = 32
MOST_BEGINNINGS = 262_144  # remembered, in some 40 MB: of 5,600 prompts of 2,000 tokens that share none; in 370 MB where each
# was asked by itself of all MOST_HOMES
NEAR_PART = 4  # who had less than a quarter of a prompt is not near: a short system prompt would keep everything on one worker
MOST_HOMES = 32  # of one beginning: a common one soon is everywhere, and who has it unknown to us is idle beside the others

Key = tuple[str, str]  # Entry.key: a process, not an address
Beginning = tuple[int, bytes]  # tokens, and their digest


@dataclass(frozen=True, slots=True)
class Near:
    """How many leading tokens of a prompt which workers had: nobody any worth going for, unless said."""

    decodes: Mapping[Key, int] = field(default_factory=dict[Key, int])
    prefills: Mapping[Key, int] = field(default_factory=dict[Key, int])  # those that were asked first
    news: bytes = b""  # the shortest beginning that nobody had; where somebody had all of it, the longest


NOWHERE = Near()


@dataclass(frozen=True, slots=True)
class _Had:
    """A beginning, the latest first. Most beginnings of a prompt share one of these."""

    decodes: tuple[Key, ...] = ()
    prefills: tuple[Key, ...] = ()


_NOBODY = _Had()


class Prefixes:
    """The last prompts and where they went."""

    def __init__(self, most_beginnings: int = MOST_BEGINNINGS) -> None:
        self._most_beginnings = most_beginnings
        self._had: OrderedDict[bytes, _Had] = OrderedDict()  # the latest last, of one prompt the shortest

    def __len__(self) -> int:
        return len(self._had)

    def find(self, beginnings: Sequence[Beginning]) -> Near:
        """`beginnings`: of the prompt, as `beginnings_of` gives them."""
        decodes, prefills = dict[Key, int](), dict[Key, int]()
        most_tokens, news = beginnings[-1] if beginnings else (0, b"")
        longer = _NOBODY
        for num_tokens, digest in reversed(beginnings):
            had = self._had.get(digest)
            if had is None:
                news = digest
            elif had is not longer and num_tokens * NEAR_PART >= most_tokens:
                longer = had
                for key in had.decodes:
                    decodes.setdefault(key, num_tokens)
                for key in had.prefills:
                    prefills.setdefault(key, num_tokens)
        return Near(decodes, prefills, news)

    def note(self, beginnings: Sequence[Beginning], decode: Key, prefill: Key | None) -> None:
        """A prompt has been sent there."""
        before, after = _NOBODY, _with(_NOBODY, decode, prefill)
        for _, digest in reversed(beginnings):
            known = self._had.pop(digest, _NOBODY)
            if known is not before:
                before, after = known, _with(known, decode, prefill)
            self._had[digest] = after
        while len(self._had) > self._most_beginnings:
            self._had.popitem(last=False)


def _with(had: _Had, decode: Key, prefill: Key | None) -> _Had:
    return _Had(_first(decode, had.decodes), _first(prefill, had.prefills) if prefill else had.prefills)


def _first(latest: Key, known: tuple[Key, ...]) -> tuple[Key, ...]:
    return (latest, *(key for key in known if key != latest))[:MOST_HOMES]


class LastBeginnings:
    """`beginnings_of`, without doing it again for the choices of one prompt, which come one after the other: of 120,000 tokens
    that takes 2 ms, in which the event loop does nothing else."""

    def __init__(self) -> None:
        self._token_ids: tuple[int, ...] = ()
        self._cache_salt = ""
        self._found: list[Beginning] = []

    def of(self, token_ids: tuple[int, ...], cache_salt: str) -> list[Beginning]:
        """Not to be changed: the next choice gets the same list."""
        if token_ids is not self._token_ids or cache_salt != self._cache_salt:
            self._found = beginnings_of(token_ids, cache_salt)
            self._token_ids, self._cache_salt = token_ids, cache_salt
        return self._found


def beginnings_of(token_ids: Sequence[int], cache_salt: str = "") -> list[Beginning]:
    """The shortest first. Caches keep what has another salt apart."""
    content, found = memoryview(array("q", token_ids)), list[Beginning]()
    digest = hashlib.blake2b(key=hashlib.blake2b(cache_salt.encode()).digest(), digest_size=16)
    start, end = 0, BLOCK_TOKENS
    while end <= len(token_ids):
        digest.update(content[start:end])
        found.append((end, digest.digest()))
        num_blocks = end // BLOCK_TOKENS
        start, end = end, end + BLOCK_TOKENS * (1 << max(0, num_blocks.bit_length() - 5))
    return found
