"""Which workers had a prompt that begins as this one does, and which prefill workers' caches have how much of it still.

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
from functools import partial

from jdisagg.core.fleet import Key
from jdisagg.router.worker_cache import WorkerCache

BLOCK_TOKENS = 32
MOST_BEGINNINGS = 262_144  # remembered, in some 45 MB: of 5,600 prompts of 2,000 tokens that share none; in 380 MB where each
# was asked by itself of all MOST_HOMES
NEAR_PART = 4  # who had less than a quarter of a prompt is not near: a short system prompt would keep everything on one worker
MOST_HOMES = 32  # of one beginning: a common one soon is everywhere, and who has it unknown to us is idle beside the others

Beginning = tuple[int, bytes]  # tokens, and their digest


@dataclass(frozen=True, slots=True)
class Kept:
    """Of a prompt, in the cache of one prefill worker."""

    num_tokens: int  # leading ones
    num_behind: int = 0  # that it has written since it last had them: it may be computing them still while these wait there


NOTHING_KEPT = Kept(0)


@dataclass(frozen=True, slots=True)
class Near:
    """How many leading tokens of a prompt which workers had: nobody any worth going for, unless said."""

    decodes: Mapping[Key, int] = field(default_factory=dict[Key, int])  # had them once: whose turns stay together, fit together
    prefills: Mapping[Key, Kept] = field(default_factory=dict[Key, Kept])  # have them still, of those that were asked first
    news: bytes = b""  # the shortest beginning that nobody had; where somebody had all of it, the longest


NOWHERE = Near()


@dataclass(frozen=True, slots=True)
class _Had:
    """A beginning, the latest first. Most beginnings of a prompt share one of these."""

    decodes: tuple[Key, ...] = ()
    prefills: tuple[WorkerCache, ...] = ()
    written: array[int] = field(default_factory=partial(array, "Q"))  # by each of `prefills`, with this


_NOBODY = _Had()


class Prefixes:
    """The last prompts and where they went."""

    def __init__(self) -> None:
        self._had: OrderedDict[bytes, _Had] = OrderedDict()  # the latest last, of one prompt the shortest

    def find(self, beginnings: Sequence[Beginning]) -> Near:
        """`beginnings`: of the prompt, as `beginnings_of` gives them."""
        decodes, prefills = dict[Key, int](), dict[Key, Kept]()
        most_tokens, news = beginnings[-1] if beginnings else (0, b"")
        longer, left = _NOBODY, list[_Left]()
        for num_tokens, digest in reversed(beginnings):
            had = self._had.get(digest)
            if had is None:
                news = digest
            elif num_tokens * NEAR_PART >= most_tokens:
                if had is not longer:
                    longer, left = had, _left(had, prefills)
                    for key in had.decodes:
                        decodes.setdefault(key, num_tokens)
                if left:
                    prefills |= {each.key: Kept(num_tokens, each.num_behind) for each in left if num_tokens <= each.most_tokens}
                    left = [each for each in left if num_tokens > each.most_tokens]
        return Near(decodes, prefills, news)

    def note(self, beginnings: Sequence[Beginning], decode: Key, prefill: WorkerCache | None) -> None:
        """A prompt has been sent there, and `prefill` counts it as written."""
        before, after = _NOBODY, _with(_NOBODY, decode, prefill)
        for _, digest in reversed(beginnings):
            known = self._had.pop(digest, _NOBODY)
            if known is not before:
                before, after = known, _with(known, decode, prefill)
            self._had[digest] = after
        while len(self._had) > MOST_BEGINNINGS:
            self._had.popitem(last=False)

    def forget(self, beginnings: Sequence[Beginning], prefill: WorkerCache, written: int, *, but: int) -> None:
        """A prompt that was noted when that cache had written so much is not there, but for as many tokens."""
        before, after = _NOBODY, _NOBODY
        for num_tokens, digest in reversed(beginnings):
            if num_tokens <= but:
                return
            if (known := self._had.get(digest)) is not None:
                if known is not before:
                    is_latest = (prefill, written) in zip(known.prefills, known.written, strict=True)
                    before, after = known, _without(known, prefill) if is_latest else known
                self._had[digest] = after


@dataclass(frozen=True, slots=True)
class _Left:
    """Of a cache that has any of a prompt still."""

    key: Key
    most_tokens: float  # of its beginning
    num_behind: int  # see `Kept`


def _left(had: _Had, but_not: Mapping[Key, Kept]) -> list[_Left]:
    both = zip(had.prefills, had.written, strict=True)
    left = [_Left(cache.key, cache.left(written), cache.written - written) for cache, written in both]
    return [each for each in left if each.most_tokens > 0 and each.key not in but_not]


def _with(had: _Had, decode: Key, prefill: WorkerCache | None) -> _Had:
    decodes = (decode, *(key for key in had.decodes if key != decode))[:MOST_HOMES]
    if prefill is None:
        return _Had(decodes, had.prefills, had.written)
    others = _without(had, prefill)
    prefills, written = (prefill, *others.prefills)[:MOST_HOMES], [prefill.written, *others.written][:MOST_HOMES]
    return _Had(decodes, prefills, array("Q", written))


def _without(had: _Had, prefill: WorkerCache) -> _Had:
    left = [i for i, cache in enumerate(had.prefills) if cache is not prefill]
    return _Had(had.decodes, tuple(had.prefills[i] for i in left), array("Q", [had.written[i] for i in left]))


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
