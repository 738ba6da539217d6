"""Pages: conservation, reference counts, eviction order, misuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jdisagg.kv.allocator import PageAllocator


def pool_of(num_pages: int, index: set[int] | None = None, evicted: list[int] | None = None) -> PageAllocator:
    """A pool whose pages in `index` can be found; those it reuses leave it, and are noted."""
    index = set() if index is None else index

    def evict(page: int) -> None:
        index.remove(page)
        if evicted is not None:
            evicted.append(page)

    return PageAllocator(num_pages, index.__contains__, evict)


def test_the_null_page_is_never_handed_out_and_a_short_pool_changes_nothing() -> None:
    pool = pool_of(5)
    assert pool.alloc(5) is None
    assert pool.num_free == 4
    assert sorted(pool.alloc(4) or ()) == [1, 2, 3, 4]
    assert pool.alloc(1) is None
    assert pool.alloc(0) == ()


def test_a_page_is_free_when_its_last_holder_let_go() -> None:
    pool = pool_of(3)
    pages = pool.alloc(1) or ()
    pool.retain(pages)
    pool.free(pages)
    assert pool.num_used == 1
    pool.free(pages)
    assert pool.num_used == 0


def test_indexed_pages_are_reused_last_and_the_tail_of_the_oldest_first() -> None:
    index, evicted = set[int](), list[int]()
    pool = pool_of(6, index, evicted)
    old, new = pool.alloc(2) or (), pool.alloc(2) or ()
    index.update(old, new)
    pool.free(old)
    pool.free(new)
    assert pool.alloc(1) == (5,)  # the one page nobody may look for
    assert pool.alloc(3) == (old[1], old[0], new[1])
    assert evicted == [old[1], old[0], new[1]]
    pool.check()


def test_a_prefix_hit_revives_an_idle_page() -> None:
    index = set[int]()
    pool = pool_of(3, index)
    pages = pool.alloc(2) or ()
    index.add(pages[0])
    pool.free(pages)
    assert pool.num_idle(pages) == 2
    pool.retain(pages[:1])
    assert pool.references(pages[0]) == 1
    assert pool.num_free == 1


def test_forgotten_idle_pages_become_plain_free_pages() -> None:
    index, evicted = set[int](), list[int]()
    pool = pool_of(3, index, evicted)
    pages = pool.alloc(2) or ()
    index.update(pages)
    pool.free(pages[:1])
    index.clear()
    pool.forgotten(pages)
    pool.free(pages[1:])
    pool.check()
    assert len(pool.alloc(2) or ()) == 2
    assert evicted == []


def test_misuse_is_an_assertion() -> None:
    pool = pool_of(4)
    pages = pool.alloc(2) or ()
    pool.free(pages)
    for misuse in (
        lambda: pool.free(pages[:1]),
        lambda: pool.free((0,)),
        lambda: pool.retain(pages),
        lambda: pool_of(1),
    ):
        with pytest.raises(AssertionError):
            misuse()


def test_the_smallest_pool_has_one_page_to_give() -> None:
    pool = pool_of(2)
    assert (pool.num_usable, pool.alloc(1), pool.alloc(1)) == (1, (1,), None)


def _free_the_same_page_twice(pool: PageAllocator, index: set[int]) -> None:
    pool._free[-1] = pool._free[-2]


def _reference_the_null_page(pool: PageAllocator, index: set[int]) -> None:
    pool._refs[0] = 1


def _lose_a_page(pool: PageAllocator, index: set[int]) -> None:
    pool._free.pop()


def _swap_a_held_page_for_a_free_one(pool: PageAllocator, index: set[int]) -> None:
    pool._free[-1] = 1


def _forget_that_an_idle_page_is_indexed(pool: PageAllocator, index: set[int]) -> None:
    index.remove(2)


def _index_a_free_page(pool: PageAllocator, index: set[int]) -> None:
    index.add(pool._free[0])


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (_reference_the_null_page, "the null page is referenced"),
        (_lose_a_page, r"1 referenced \+ 3 free != 5"),
        (_free_the_same_page_twice, "a page is free twice"),
        (_swap_a_held_page_for_a_free_one, "a free page is referenced"),
        (_forget_that_an_idle_page_is_indexed, "an idle page is not indexed"),
        (_index_a_free_page, "a free page is indexed"),
    ],
)
def test_the_check_names_what_is_damaged(damage: Callable[[PageAllocator, set[int]], None], finding: str) -> None:
    index = set[int]()
    pool = pool_of(6, index)
    pool.alloc(2)
    index.add(2)
    pool.free((2,))  # one page held, one idle, three free
    pool.check()
    damage(pool, index)
    with pytest.raises(AssertionError, match=f"^{finding}"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, index and drop pages; a model counts references beside the allocator."""

    def __init__(self) -> None:
        super().__init__()
        self.index: set[int] = set()
        self.pool = pool_of(9, self.index)
        self.holders: list[tuple[int, ...]] = []

    @rule(n=st.integers(0, 5))
    def take(self, n: int) -> None:
        before = self.pool.num_free
        pages = self.pool.alloc(n)
        assert (pages is None) == (n > before)
        if pages is not None:
            assert not set(pages) & self.index
            self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.holders))
        self.pool.retain(pages)
        self.holders.append(pages)

    @precondition(lambda self: self.index)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.index)))
        self.pool.retain((page,))
        self.holders.append((page,))

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def index_one(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted({p for h in self.holders for p in h})))
        self.index.add(page)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.pool.free(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule()
    def forget(self) -> None:
        pages = tuple(self.index)
        self.index.clear()
        self.pool.forgotten(pages)

    @invariant()
    def references_are_those_of_the_holders(self) -> None:
        self.pool.check()
        held = [p for h in self.holders for p in h]
        assert all(self.pool.references(p) == held.count(p) for p in range(1, 9))
        assert self.pool.num_used == len(set(held))


TestPool = PoolMachine.TestCase
