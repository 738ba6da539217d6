"""Which workers had a prompt that begins as this one does: their prefix caches may have it still."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 32
MOST_PROMPTS = 65536  # remembered; some 20 MB
MOST_HOMES = 8  # of one beginning: a common one, as of a system prompt, soon is everywhere

Key = tuple[str, str]  # Entry.key: a process, not an address


@dataclass(frozen=True, slots=True)
class Near:
    """Who had the longest known beginning of a prompt, the latest first: nobody, unless said."""

    decodes: tuple[Key, ...] = ()
    prefills: tuple[Key, ...] = ()  # those that were asked first
    num_tokens: int = 0  # in that beginning


class Prefixes:
    """The last prompts and where they went, each by all its whole blocks: the next turn of a chat begins with those."""

    def __init__(self, most_prompts: int = MOST_PROMPTS) -> None:
        self._most_prompts = most_prompts
        self._near: OrderedDict[bytes, Near] = OrderedDict()  # the latest last

    def __len__(self) -> int:
        return len(self._near)

    def find(self, beginnings: Sequence[bytes]) -> Near:
        """`beginnings`: of the prompt, as `beginnings_of` gives them."""
        for beginning in reversed(beginnings):
            if (near := self._near.get(beginning)) is not None:
                self._near.move_to_end(beginning)
                return near
        return Near()

    def note(self, beginnings: Sequence[bytes], decode: Key, prefill: Key | None) -> None:
        """A prompt has been sent there."""
        if beginnings:
            known = self._near.pop(beginnings[-1], Near())
            prefills = _first(prefill, known.prefills) if prefill else known.prefills
            near = Near(_first(decode, known.decodes), prefills, len(beginnings) * BLOCK_TOKENS)
            self._near[beginnings[-1]] = near
            if len(self._near) > self._most_prompts:
                self._near.popitem(last=False)


def _first(latest: Key, known: tuple[Key, ...]) -> tuple[Key, ...]:
    return (latest, *(key for key in known if key != latest))[:MOST_HOMES]


class LastBeginnings:
    """`beginnings_of`, without doing it again for the choices of one prompt, which come one after the other: of 120,000 tokens
    that takes 8 ms, in which the event loop does nothing else."""

    def __init__(self) -> None:
        self._token_ids: tuple[int, ...] = ()
        self._cache_salt = ""
        self._found: list[bytes] = []

    def of(self, token_ids: tuple[int, ...], cache_salt: str) -> list[bytes]:
        """Not to be changed: the next choice gets the same list."""
        if token_ids is not self._token_ids or cache_salt != self._cache_salt:
            self._found = beginnings_of(token_ids, cache_salt)
            self._token_ids, self._cache_salt = token_ids, cache_salt
        return self._found


def beginnings_of(token_ids: Sequence[int], cache_salt: str = "") -> list[bytes]:
    """One digest for each whole block, of everything up to its end. Caches keep what has another salt apart."""
    blocks, found = memoryview(array("q", token_ids)), list[bytes]()
    digest = hashlib.blake2b(cache_salt.encode(), digest_size=16).digest()
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        digest = hashlib.blake2b(blocks[end - BLOCK_TOKENS : end], key=digest, digest_size=16).digest()
        found.append(digest)
    return found
