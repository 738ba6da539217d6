"""Finds KV pages that already hold a prompt's leading tokens.

A full page is named by a chain: key(i) = hash(key(i-1) + tokens of page i), with key(-1) made from the cache salt. Equal
keys therefore mean equal salt and equal tokens from position 0 on. 128-bit BLAKE2b: no tenant can construct a collision. Salts
are hashed apart from pages, or a salt could be made of a page's parent and tokens, and its prompts be taken for what follows.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import KeysView, Sequence

_KEY_BYTES = 16


class PrefixIndex:
    """Key -> page, and back. Knows nothing of references: the allocator calls `evict` before it reuses an idle page."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def has(self, page: int) -> bool:
        """Whether the page can be found."""
        return page in self._key_of

    def knows(self, key: bytes) -> bool:
        """Whether a page is found under that key, if all those before it are."""
        return key in self._page_of

    def keys(self, token_ids: Sequence[int], salt: str = "") -> list[bytes]:
        """Keys of all full pages of `token_ids`."""
        keys: list[bytes] = []
        parent = self.root_key(salt)
        for start in range(0, len(token_ids) - self._page_size + 1, self._page_size):
            parent = self.next_key(parent, token_ids[start : start + self._page_size])
            keys.append(parent)
        return keys

    def root_key(self, salt: str) -> bytes:
        """Parent of the first page's key."""
        return _digest(salt.encode(), purpose=b"salt")

    def next_key(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Key of the page that holds `token_ids` (a full page) after the page of `parent`."""
        assert len(token_ids) == self._page_size, f"{len(token_ids)} tokens are not one page of {self._page_size}"
        return _digest(parent + array("I", token_ids).tobytes())

    def match_keys(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """Pages of the longest indexed prefix of the tokens that have these `keys`, in token order."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return tuple(pages)

    def insert(self, key: bytes, page: int) -> bool:
        """Index a page whose KV a committed step has written. False when another page is known by that key already."""
        if key in self._page_of:
            return False
        assert page not in self._key_of, f"page {page} is indexed under another key"
        self._page_of[key] = page
        self._key_of[page] = key
        return True

    def evict(self, page: int) -> bytes:
        """Forget an indexed page, whose content is about to be overwritten; returns its key."""
        key = self._key_of.pop(page)
        del self._page_of[key]
        return key

    def indexed(self) -> KeysView[bytes]:
        """Keys of all pages that can be found."""
        return self._page_of.keys()

    def reset(self) -> tuple[int, ...]:
        """Forget everything; returns the pages that were indexed."""
        pages = tuple(self._key_of)
        self._page_of.clear()
        self._key_of.clear()
        return pages


def _digest(data: bytes, purpose: bytes = b"") -> bytes:
    return hashlib.blake2b(data, digest_size=_KEY_BYTES, person=purpose).digest()
