"""Changes of a prefix index as data: enough for somebody else to keep the same set of pages.

    index changes -> PrefixJournal (owner's thread) -> Batch, numbered -> any CachedPages that applies all of them, in order

Applying is exact: after batch N a `CachedPages` holds the pages the index held when batch N was taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CachedPage:
    """What one indexed page holds."""

    parent: bytes | None  # key of the page before it; None for the first page of a prefix
    token_ids: tuple[int, ...]  # one page of them
    root: bytes  # key made from the cache salt: prefixes of different salts share nothing


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive pages of one prefix were indexed, in token order; each one's parent is the one before it."""

    keys: tuple[bytes, ...]
    parent: bytes | None  # of the first
    token_ids: tuple[int, ...]  # len(keys) pages
    root: bytes


@dataclass(frozen=True, slots=True)
class Removed:
    """These pages are no longer indexed."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """No page is indexed."""


KVEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes of one engine tick. The first of an epoch has sequence 1, the next 2, without a gap."""

    sequence: int
    time_s: float  # seconds since 1970
    events: tuple[KVEvent, ...]


class PrefixJournal:
    """Collects changes until they are taken; owned by the thread that owns the index."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []
        self._removed: list[bytes] = []  # not yet an event: evictions come one by one

    def stored(self, event: Stored) -> None:
        """Pages were indexed."""
        self._end_removals()
        self._events.append(event)

    def removed(self, key: bytes) -> None:
        """A page was evicted."""
        self._removed.append(key)

    def cleared(self) -> None:
        """Everything was forgotten."""
        self._end_removals()
        self._events.append(Cleared())

    def take(self) -> tuple[KVEvent, ...]:
        """Changes since the last call, in order."""
        self._end_removals()
        if not self._events:
            return ()
        events, self._events = tuple(self._events), []
        return events

    def _end_removals(self) -> None:
        if self._removed:
            self._events.append(Removed(tuple(self._removed)))
            self._removed.clear()


class CachedPages:
    """Key -> page of an index elsewhere, kept by applying its events in order."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[bytes, CachedPage] = {}

    def apply(self, events: Iterable[KVEvent]) -> None:
        """Raises KeyError when a page is removed that is not here (an event was lost), ValueError for tokens that do not fit
        the pages."""
        for event in events:
            match event:
                case Stored():
                    self._add(event)
                case Removed(keys=keys):
                    for key in keys:
                        del self.pages[key]
                case Cleared():
                    self.pages.clear()

    def _add(self, event: Stored) -> None:
        size, parent = self.page_size, event.parent
        if len(event.token_ids) != len(event.keys) * size:
            raise ValueError(f"{len(event.keys)} pages of {size} tokens: got {len(event.token_ids)} token ids")
        for i, key in enumerate(event.keys):
            self.pages[key] = CachedPage(parent, event.token_ids[i * size : (i + 1) * size], event.root)
            parent = key


def as_events(keys: Sequence[bytes], pages: Sequence[CachedPage]) -> tuple[Stored, ...]:
    """A set of pages as the events that build it."""
    return tuple(Stored((key,), page.parent, page.token_ids, page.root) for key, page in zip(keys, pages, strict=True))


def digest(keys: Iterable[bytes]) -> str:
    """32 hex digits that are equal for equal sets of page keys, in any order: two views of one cache can be compared."""
    total = 0
    for key in keys:
        total ^= int.from_bytes(key)
    return f"{total:032x}"
