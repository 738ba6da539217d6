"""Who holds which KV page: reference counts, a free list, and an LRU list of free pages whose content is still worth finding.

    free list --alloc--> referenced --free--> free list        (content not indexed)
                              ^          `--> idle, LRU order   (content in the prefix index)
                   retain ----|---------------'      `--alloc, oldest first--> referenced, after `on_evict(page)`

Page 0 is the null page: never handed out, target of masked writes. Every operation is O(1) per page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

NULL_PAGE = 0


class PageAllocator:
    """Owns the page ids [1, num_pages). Misuse (double free, foreign page) is an assertion: our bug, never a request's."""

    def __init__(self, num_pages: int, is_indexed: Callable[[int], bool], on_evict: Callable[[int], object]) -> None:
        """`is_indexed(page)`: the prefix index points to it, so that it becomes idle instead of free."""
        assert num_pages >= 2, f"a pool needs the null page and one more, got num_pages={num_pages}"
        self.num_pages = num_pages
        self._is_indexed = is_indexed
        self._on_evict = on_evict
        self._free = list(range(num_pages - 1, 0, -1))  # pop() gives the lowest id first
        self._idle: OrderedDict[int, None] = OrderedDict()  # unreferenced but indexed, least recently used first
        self._refs = [0] * num_pages

    @property
    def num_usable(self) -> int:
        """Pages that can ever be handed out."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages `alloc` could give now; idle indexed ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages with at least one reference."""
        return self.num_usable - self.num_free

    def alloc(self, n: int) -> tuple[int, ...] | None:
        """Hand out `n` pages with one reference each, or None (and nothing changes) when fewer are free."""
        assert n >= 0, f"alloc({n})"
        if n > self.num_free:
            return None
        pages: list[int] = []
        for _ in range(n):
            page = self._free.pop() if self._free else self._evict_oldest()
            self._refs[page] = 1
            pages.append(page)
        return tuple(pages)

    def retain(self, pages: Iterable[int]) -> None:
        """Add one reference to pages that are referenced or idle (a prefix hit)."""
        for page in pages:
            assert self._refs[page] > 0 or page in self._idle, f"retain of free page {page}"
            if self._refs[page] == 0:
                del self._idle[page]
            self._refs[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Drop one reference each. Given in token order, the tail of a prefix is evicted before its head."""
        for page in reversed(tuple(pages)):
            assert self._refs[page] > 0, f"free of page {page} that nobody holds"
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if self._is_indexed(page):
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def touch(self, pages: Iterable[int]) -> None:
        """The idle ones among these are evicted last."""
        for page in pages:
            if page in self._idle:
                self._idle.move_to_end(page)

    def forgotten(self, pages: Iterable[int]) -> None:
        """The prefix index has forgotten these pages."""
        for page in pages:
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of `pages` are idle: taking those also takes from `num_free`."""
        return sum(1 for page in pages if self._refs[page] == 0)

    def references(self, page: int) -> int:
        """Current reference count."""
        return self._refs[page]

    def check(self) -> None:
        """Assert conservation: every page is in exactly one of free, idle, referenced."""
        referenced = sum(1 for count in self._refs if count > 0)
        assert self._refs[NULL_PAGE] == 0, "the null page is referenced"
        assert referenced + self.num_free == self.num_usable, (
            f"{referenced} referenced + {self.num_free} free != {self.num_usable}"
        )
        assert len(set(self._free) | set(self._idle)) == self.num_free, "a page is free twice"
        assert all(self._refs[page] == 0 for page in (*self._free, *self._idle)), "a free page is referenced"
        assert all(self._is_indexed(page) for page in self._idle), "an idle page is not indexed"
        assert not any(self._is_indexed(page) for page in self._free), "a free page is indexed"

    def _evict_oldest(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._on_evict(page)
        return page
