"""Pages of sequences: finding shared prefixes, reserving, growing, offering to the prefix index, freeing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from jdisagg.kv.allocator import PageAllocator
from jdisagg.kv.events import PrefixJournal, Stored, digest
from jdisagg.kv.prefix import PrefixIndex
from jdisagg.sched.sequence import Holding, Sequence


class PageBook:
    """The allocator and the prefix index behind one set of verbs; KV group 0."""

    def __init__(self, *, num_pages: int, page_size: int, enable_prefix_caching: bool) -> None:
        self.page_size = page_size
        self._index = PrefixIndex(page_size)
        self._allocator = PageAllocator(num_pages, self._index.has, self._evict)
        self._caching = enable_prefix_caching
        self._journal: PrefixJournal | None = None  # None = nobody wants to know
        self.num_promised = 0  # pages set aside at admission and not taken yet

    @property
    def num_usable(self) -> int:
        """Pages of the pool without the null page."""
        return self._allocator.num_usable

    @property
    def num_free(self) -> int:
        """Pages that can be taken now."""
        return self._allocator.num_free

    @property
    def num_unpromised(self) -> int:
        """Of the free pages those that are set aside for nobody; below 0 where outputs outgrew what was kept for them."""
        return self.num_free - self.num_promised

    def is_unshared(self, page: int) -> bool:
        """Whether it would be free once its one owner gave it back."""
        return self._allocator.references(page) == 1

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def find(self, sequence: Sequence, max_tokens: int, *, least: int = 0) -> tuple[int, ...]:
        """Indexed pages of the sequence's first `max_tokens` known tokens, longest prefix; nothing is taken. Those of a long
        prompt are not gone through where fewer than `least` are found, which are told as none."""
        num_pages = max_tokens // self.page_size
        if not self._caching or num_pages < least:
            return ()
        self._hash(sequence, num_pages)
        if least > 0 and not self._index.knows(sequence.holding.keys[least - 1]):
            return ()
        return self._index.match_keys(sequence.holding.keys[:num_pages])

    def cost(self, hits: tuple[int, ...], num_pages: int) -> int:
        """How far `num_free` falls when a sequence takes `hits` and enough new pages to hold `num_pages`."""
        return num_pages - len(hits) + self._allocator.num_idle(hits)

    def pin(self, holding: Holding, hits: tuple[int, ...]) -> None:
        """Take references to found pages as the leading ones of an empty holding."""
        assert not holding.pages, "pin into a holding that has pages"
        self._allocator.retain(hits)
        holding.pages.extend(hits)
        holding.num_indexed = holding.num_offered = len(hits)

    def share(self, holding: Holding, donor: Holding, num_pages: int) -> None:
        """Take references to the donor's first pages as the leading ones of an empty holding. What the donor would offer to the
        index, this one does; nobody offers what was taken out of it."""
        self.pin(holding, tuple(donor.pages[:num_pages]))
        holding.keys = donor.keys[:num_pages]
        holding.num_offered = min(donor.num_offered, num_pages)
        holding.twins = donor.twins[: bisect_left(donor.twins, num_pages)]
        holding.is_private = donor.is_private

    def grow(self, holding: Holding, num_pages: int) -> tuple[int, ...] | None:
        """Extend to `num_pages` pages; the new ones (maybe none), or None and no change when memory is short. What it was
        promised goes first."""
        new = self._allocator.alloc(max(0, num_pages - len(holding.pages)))
        if new:
            holding.pages.extend(new)
            self._promise(holding, max(0, holding.num_promised - len(new)))
        return new

    def set_aside(self, holding: Holding, num_pages: int) -> None:
        """Promise what is missing to `num_pages` pages in all; kept until it is taken, or the holding is dropped."""
        self._promise(holding, max(0, num_pages - len(holding.pages)))

    def cache_full_pages(self, sequence: Sequence) -> None:
        """Offer the full pages below `num_computed` to the prefix index: the steps that wrote them have committed. Twins whose
        other page is gone are offered again: nothing is found behind a hole."""
        holding = sequence.holding
        num_full = min(sequence.num_computed, sequence.num_known) // self.page_size  # beyond its end there is junk
        if num_full <= holding.num_indexed:
            return
        begin, holding.num_offered, holding.num_indexed = holding.num_offered, num_full, num_full
        if holding.is_private or not self._caching:
            return
        self._hash(sequence, num_full)
        new: list[int] = []
        for i in (*self._take_lost(holding), *range(begin, num_full)):
            if self._index.insert(holding.keys[i], holding.pages[i]):
                new.append(i)
            elif not self._index.has(holding.pages[i]):  # it is where who shares it has offered it
                holding.twins.append(i)
        if self._journal is not None:
            self._record(self._journal, sequence, new)

    def drop(self, holding: Holding) -> None:
        """Give every page back and forget the promise; keys stay, tokens do not change. Of pages that are found in place
        of its own, and of its own among these, none is to be evicted before those behind it."""
        self._allocator.free(holding.pages)
        if holding.twins:
            self._allocator.touch(reversed(self._index.match_keys(holding.keys[: len(holding.pages)])))
        holding.pages.clear()
        holding.twins.clear()
        holding.num_indexed = holding.num_offered = holding.held_tokens = 0
        self._promise(holding, 0)

    def distrust(self, holding: Holding) -> None:
        """Nobody finds its pages from now on: what they hold may be bad. Those who share them keep them."""
        pages = [page for page in holding.pages if self._index.has(page)]
        for page in pages:
            self._evict(page)
        self._allocator.forgotten(pages)

    def reset_index(self, live: Iterable[Holding]) -> int:
        """Forget all cached prefixes; returns the number of pages forgotten. Those `live` keep their pages, which nobody finds
        from now on."""
        for holding in live:
            holding.is_private = True
        pages = self._index.reset()
        self._allocator.forgotten(pages)
        if self._journal is not None:
            self._journal.cleared()
        return len(pages)

    def journal(self) -> PrefixJournal:
        """Begin to write down every change of the prefix index, for one reader that takes them. Call before the first one."""
        assert self._journal is None, "the changes of the prefix index have a reader already"
        assert not len(self._index), "pages were indexed before anybody recorded it"
        self._journal = PrefixJournal()
        return self._journal

    def describe_index(self) -> dict[str, Any]:
        """Number of indexed pages and the digest of their keys; cost grows with their number."""
        keys = self._index.indexed()
        return {"pages": len(keys), "digest": digest(keys)}

    def check(self, holdings: Iterable[Holding]) -> None:
        """Assert that references and promises are exactly those of `holdings` and that no page is lost."""
        self._allocator.check()
        counted: dict[int, int] = {}
        promised = 0
        for holding in holdings:
            promised += holding.num_promised
            assert len(set(holding.pages)) == len(holding.pages), "a sequence holds one page twice"
            for page in holding.pages:
                counted[page] = counted.get(page, 0) + 1
        for page, count in counted.items():
            assert self._allocator.references(page) == count, (
                f"page {page}: {self._allocator.references(page)} references, {count} holders"
            )
        assert len(counted) == self._allocator.num_used, (
            f"{self._allocator.num_used} pages used, {len(counted)} held by sequences"
        )
        assert promised == self.num_promised, f"{self.num_promised} pages promised, {promised} to sequences"

    def _promise(self, holding: Holding, num_pages: int) -> None:
        self.num_promised += num_pages - holding.num_promised
        holding.num_promised = num_pages

    def _evict(self, page: int) -> None:
        key = self._index.evict(page)
        if self._journal is not None:
            self._journal.removed(key)

    def _take_lost(self, holding: Holding) -> list[int]:
        """Of its twins, in order, those whose other pages are gone, and maybe more; it has them no longer. All of a long prompt
        may be twins, and be asked about with each page that is filled: a prefix is evicted from its end on, and of pages that
        are not trusted from its beginning, so that its ends tell. A hole between pages of several owners is seen later: until
        then the prefix is found up to there."""
        twins, keys = holding.twins, holding.keys
        num_kept = len(twins) if twins and self._index.knows(keys[twins[0]]) else 0
        while num_kept and not self._index.knows(keys[twins[num_kept - 1]]):
            num_kept -= 1
        lost = twins[num_kept:]
        del twins[num_kept:]
        return lost

    def _record(self, journal: PrefixJournal, sequence: Sequence, new: list[int]) -> None:
        """One event for each run of consecutive pages in `new` (indices into the holding, ascending)."""
        keys, size = sequence.holding.keys, self.page_size
        root = self._index.root_key(sequence.request.cache_salt)
        begin = 0
        for end in range(1, len(new) + 1):
            if end < len(new) and new[end] == new[end - 1] + 1:
                continue
            first, last = new[begin], new[end - 1] + 1
            parent = keys[first - 1] if first else None
            journal.stored(Stored(tuple(keys[first:last]), parent, sequence.tokens(first * size, last * size), root))
            begin = end

    def _hash(self, sequence: Sequence, num_pages: int) -> None:
        keys, size = sequence.holding.keys, self.page_size
        while len(keys) < num_pages:
            parent = keys[-1] if keys else self._index.root_key(sequence.request.cache_salt)
            begin = len(keys) * size
            keys.append(self._index.next_key(parent, sequence.tokens(begin, begin + size)))
