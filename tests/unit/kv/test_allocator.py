"""Pages: conservation, reference counts, eviction order, misuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jdisagg.kv.allocator import PageAllocator


def test_the_null_page_is_never_handed_out_and_a_short_pool_changes_nothing() -> None:
    pool = PageAllocator(5)
    assert pool.alloc(5) is None
    assert pool.num_free == 4
    assert sorted(pool.alloc(4) or ()) == [1, 2, 3, 4]
    assert pool.alloc(1) is None
    assert pool.alloc(0) == ()


def test_a_page_is_free_when_its_last_holder_let_go() -> None:
    pool = PageAllocator(3)
    pages = pool.alloc(1) or ()
    pool.retain(pages)
    pool.free(pages)
    assert pool.num_used == 1
    pool.free(pages)
    assert pool.num_used == 0


def test_indexed_pages_are_reused_last_and_the_tail_of_the_oldest_first() -> None:
    evicted: list[int] = []
    pool = PageAllocator(6, evicted.append)
    old, new = pool.alloc(2) or (), pool.alloc(2) or ()
    for page in (*old, *new):
        pool.set_indexed(page)
    pool.free(old)
    pool.free(new)
    assert pool.alloc(1) == (5,)  # the one page nobody may look for
    assert pool.alloc(3) == (old[1], old[0], new[1])
    assert evicted == [old[1], old[0], new[1]]
    pool.check()


def test_a_prefix_hit_revives_an_idle_page() -> None:
    pool = PageAllocator(3)
    pages = pool.alloc(2) or ()
    pool.set_indexed(pages[0])
    pool.free(pages)
    assert pool.num_idle(pages) == 2
    pool.retain(pages[:1])
    assert pool.references(pages[0]) == 1
    assert pool.num_free == 1


def test_forgotten_idle_pages_become_plain_free_pages() -> None:
    evicted: list[int] = []
    pool = PageAllocator(3, evicted.append)
    pages = pool.alloc(2) or ()
    for page in pages:
        pool.set_indexed(page)
    pool.free(pages[:1])
    pool.clear_indexed(pages)
    pool.free(pages[1:])
    pool.check()
    assert len(pool.alloc(2) or ()) == 2
    assert evicted == []


def test_misuse_is_an_assertion() -> None:
    pool = PageAllocator(4)
    pages = pool.alloc(2) or ()
    pool.free(pages)
    for misuse in (
        lambda: pool.free(pages[:1]),
        lambda: pool.free((0,)),
        lambda: pool.retain(pages),
        lambda: pool.set_indexed(pages[0]),
        lambda: PageAllocator(1),
    ):
        with pytest.raises(AssertionError):
            misuse()


def test_the_smallest_pool_has_one_page_to_give() -> None:
    pool = PageAllocator(2)
    assert (pool.num_usable, pool.alloc(1), pool.alloc(1)) == (1, (1,), None)


def _free_the_same_page_twice(pool: PageAllocator) -> None:
    pool._free[-1] = pool._free[-2]


def _reference_the_null_page(pool: PageAllocator) -> None:
    pool._refs[0] = 1


def _lose_a_page(pool: PageAllocator) -> None:
    pool._free.pop()


def _swap_a_held_page_for_a_free_one(pool: PageAllocator) -> None:
    pool._free[-1] = 1


def _forget_that_an_idle_page_is_indexed(pool: PageAllocator) -> None:
    pool._indexed[2] = 0


def _index_a_free_page(pool: PageAllocator) -> None:
    pool._indexed[pool._free[0]] = 1


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
def test_the_check_names_what_is_damaged(damage: Callable[[PageAllocator], None], finding: str) -> None:
    pool = PageAllocator(6)
    pool.alloc(2)
    pool.set_indexed(2)
    pool.free((2,))  # one page held, one idle, three free
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError, match=f"^{finding}"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, index and drop pages; a model counts references beside the allocator."""

    def __init__(self) -> None:
        super().__init__()
        self.index: set[int] = set()
        self.pool = PageAllocator(9, self.index.remove)
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
        self.pool.set_indexed(page)
        self.index.add(page)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.pool.free(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule()
    def forget(self) -> None:
        self.pool.clear_indexed(tuple(self.index))
        self.index.clear()

    @invariant()
    def references_are_those_of_the_holders(self) -> None:
        self.pool.check()
        held = [p for h in self.holders for p in h]
        assert all(self.pool.references(p) == held.count(p) for p in range(1, 9))
        assert self.pool.num_used == len(set(held))


TestPool = PoolMachine.TestCase
