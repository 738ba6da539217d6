"""The page book: what is taken, shared, published and forgotten, and that its check sees damage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.kv.events import Removed, Stored
from jdisagg.kv.prefix import PrefixIndex
from jdisagg.sched.pages import PageBook
from jdisagg.sched.sequence import Holding, Sequence
from jdisagg.sched.states import Status
from tests.unit.sched.engine_fake import request

PROMPT = tuple(range(1, 14))  # three full pages of 4 and one token


def book(*, num_pages: int = 17, caching: bool = True) -> PageBook:
    """Pages of 4 tokens."""
    return PageBook(num_pages=num_pages, page_size=4, enable_prefix_caching=caching)


def computed(pages: PageBook, num_computed: int, prompt: tuple[int, ...] = PROMPT, salt: str = "") -> Sequence:
    """A sequence with pages for its prompt, the first tokens of it computed and offered to the index."""
    asked = request("a", prompt, salt=salt)
    sequence = Sequence(request=asked, order=(0, 0), status=Status.RUNNING, target=len(prompt), stop_ids=frozenset())
    sequence.num_computed = num_computed
    assert pages.grow(sequence.holding, pages.pages_for(len(prompt))) is not None
    pages.cache_full_pages(sequence)
    return sequence


@given(num_tokens=st.integers(0, 99))
def test_pages_hold_all_tokens_and_none_is_empty(num_tokens: int) -> None:
    num_pages = book().pages_for(num_tokens)
    assert num_pages * 4 >= num_tokens > (num_pages - 1) * 4


def test_without_caching_full_pages_are_counted_like_any_others_and_offered_to_nobody() -> None:
    pages = book(caching=False)
    one = computed(pages, 11)
    assert one.holding.num_indexed == 2, "the next one to be filled is the third"
    assert (one.holding.keys, pages.find(one, 11), pages.describe_index()["pages"]) == ([], (), 0)


def test_growing_to_what_is_there_takes_nothing() -> None:
    pages = book(num_pages=4)
    holding = Holding()
    assert pages.grow(holding, 2) == (1, 2)
    assert pages.grow(holding, 2) == ()
    assert pages.grow(holding, 0) == ()
    assert pages.grow(holding, 4) is None
    assert (holding.pages, pages.num_free) == ([1, 2], 1)


def test_pages_that_are_not_trusted_are_found_no_more_and_stay_with_who_shares_them() -> None:
    pages = book()
    journal = pages.journal()
    one, other = computed(pages, 12), computed(pages, 12, (*PROMPT[:8], 90, 91, 92, 93))
    sharer = Holding()
    pages.pin(sharer, pages.find(one, 8))
    journal.take()
    keys = tuple(one.holding.keys)
    pages.distrust(one.holding)
    assert journal.take() == (Removed(keys),)
    assert pages.find(one, 13) == pages.find(other, 12) == ()
    pages.drop(one.holding)
    pages.check([other.holding, sharer])
    again = computed(pages, 12)
    assert pages.find(one, 13) == tuple(again.holding.pages[:3])


def test_only_full_pages_whose_tokens_are_computed_and_known_are_found() -> None:
    pages = book()
    one = computed(pages, 11)
    assert pages.find(one, 13) == tuple(one.holding.pages[:2])
    one.num_computed = 99  # steps may run past a sequence's end: junk
    pages.cache_full_pages(one)
    assert pages.find(one, 13) == tuple(one.holding.pages[:3])
    assert pages.find(one, 11) == tuple(one.holding.pages[:2])
    assert pages.find(one, 3) == ()
    pages.check([one.holding])


def test_without_caching_nothing_is_found_and_nothing_forgotten() -> None:
    pages = book(caching=False)
    one = computed(pages, 13)
    assert pages.find(one, 13) == ()
    assert pages.reset_index([one.holding]) == 0
    assert one.holding.keys == []
    pages.drop(one.holding)
    assert pages.num_free == pages.num_usable


def test_what_was_forgotten_is_not_offered_again() -> None:
    pages = book()
    one = computed(pages, 8)
    assert pages.reset_index([one.holding]) == 2
    one.num_computed = 12
    pages.cache_full_pages(one)
    assert pages.find(one, 12) == ()
    other = computed(pages, 8)
    one.num_computed = 13
    pages.cache_full_pages(one)
    assert pages.find(one, 12) == tuple(other.holding.pages[:2])  # a page behind what was written before stays unknown
    assert pages.reset_index([]) == 2
    pages.check([one.holding, other.holding])


def test_pages_whose_tokens_another_one_has_are_offered_again_when_that_is_gone() -> None:
    pages = book(num_pages=10)
    first = computed(pages, 8)
    twin = computed(pages, 8)
    assert (twin.holding.twins, twin.holding.num_indexed) == ([0, 1], 2)
    pages.drop(first.holding)
    assert pages.find(twin, 8) != tuple(twin.holding.pages[:2])
    taken = Holding()
    assert pages.grow(taken, pages.num_free) is not None  # the first one's pages are forgotten
    assert pages.find(twin, 8) == ()
    twin.num_computed = 12
    pages.cache_full_pages(twin)
    assert pages.find(twin, 12) == tuple(twin.holding.pages[:3])
    assert twin.holding.twins == []
    pages.check([twin.holding, taken])


def test_of_many_twins_only_those_are_offered_again_whose_others_are_gone() -> None:
    pages, prompt = book(num_pages=14), tuple(range(1, 22))
    first, twin = computed(pages, 16, prompt), computed(pages, 16, prompt)
    whole = pages.find(first, 16)
    pages.drop(first.holding)
    taken = Holding()
    assert pages.grow(taken, 5) is not None  # three that were free, and the last two of the first one
    assert pages.find(twin, 16) == whole[:2]
    twin.num_computed = 20
    pages.cache_full_pages(twin)
    assert twin.holding.twins == [0, 1]
    assert pages.find(twin, 20) == (*whole[:2], *twin.holding.pages[2:5])
    pages.check([twin.holding, taken])


def test_twins_whose_others_are_not_trusted_are_offered_again() -> None:
    pages, prompt = book(num_pages=20), tuple(range(1, 22))
    first, twin, bad = computed(pages, 16, prompt), computed(pages, 16, prompt), Holding()
    pages.pin(bad, pages.find(first, 8))
    pages.distrust(bad)
    twin.num_computed = 20
    pages.cache_full_pages(twin)
    assert pages.find(twin, 20) == (*twin.holding.pages[:2], *first.holding.pages[2:4], twin.holding.pages[4])
    assert twin.holding.twins == [2, 3]
    pages.check([first.holding, twin.holding, bad])


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_page_that_is_filled_costs_the_same_however_many_twins_are_before_it(
    is_forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    insert, knows = PrefixIndex.insert, PrefixIndex.knows
    monkeypatch.setattr(PrefixIndex, "insert", lambda index, key, page: asked.append(key) or insert(index, key, page))
    monkeypatch.setattr(PrefixIndex, "knows", lambda index, key: asked.append(key) or knows(index, key))
    pages, prompt = book(num_pages=900), tuple(range(1, 808))
    twins = [computed(pages, 800, prompt) for _ in range(2)]
    last = twins[-1]
    if is_forked:
        last = computed(book(num_pages=900), 0, prompt)
        last.holding = Holding()
        pages.share(last.holding, twins[-1].holding, 200)
        assert pages.grow(last.holding, 202) is not None
    assert len(last.holding.twins) == 200
    asked.clear()
    last.num_computed = 804
    pages.cache_full_pages(last)
    assert len(asked) < 5
    assert len(last.holding.twins) == 200


def test_the_head_of_a_prefix_that_two_have_computed_in_turns_is_evicted_last() -> None:
    pages = book()
    one, other = computed(pages, 4), computed(pages, 8)
    one.num_computed = 12
    pages.cache_full_pages(one)
    whole = pages.find(one, 12)
    assert whole == (one.holding.pages[0], other.holding.pages[1], one.holding.pages[2])
    pages.drop(other.holding)
    pages.drop(one.holding)
    for left in (2, 1, 0):
        assert pages.grow(Holding(), pages.num_free - left) is not None
        assert pages.find(one, 12) == whole[:left]


def test_twins_are_forgotten_with_their_pages() -> None:
    pages = book()
    first, twin = computed(pages, 8), computed(pages, 8)
    pages.drop(twin.holding)
    assert twin.holding.twins == []
    pages.check([first.holding])


def test_a_found_page_costs_a_free_one_only_while_nobody_holds_it() -> None:
    pages = book()
    one = computed(pages, 12)
    hits = pages.find(one, 12)
    assert pages.cost(hits, 5) == 2
    pages.drop(one.holding)
    assert pages.cost(hits, 5) == 5
    before = pages.num_free
    other = Holding()
    pages.pin(other, hits)
    pages.grow(other, 5)
    assert before - pages.num_free == 5
    assert other.num_indexed == 3


def test_sharing_takes_references_and_keys_of_the_leading_pages() -> None:
    pages = book()
    one = computed(pages, 12)
    child = Holding()
    pages.share(child, one.holding, 2)
    assert (child.pages, child.keys) == (one.holding.pages[:2], one.holding.keys[:2])
    pages.check([one.holding, child])
    pages.drop(one.holding)
    assert pages.num_free == pages.num_usable - 2
    pages.drop(child)
    pages.check([])


def _forked(pages: PageBook, donor: Holding) -> Sequence:
    """A choice that shares the donor's three full pages and has filled one more."""
    choice = computed(book(), 0, (*PROMPT[:12], 20, 21, 22, 23))
    choice.holding = Holding()
    pages.share(choice.holding, donor, 3)
    assert pages.grow(choice.holding, 4) is not None
    choice.num_computed = 16
    pages.cache_full_pages(choice)
    return choice


def test_a_choice_does_not_offer_again_what_its_sibling_has_offered() -> None:
    pages = book()
    first = computed(pages, 0)
    choice = computed(book(), 0, (*PROMPT[:12], *range(20, 28)))
    choice.holding = Holding()
    pages.share(choice.holding, first.holding, 3)  # before the step that fills them is committed
    assert pages.grow(choice.holding, 5) is not None
    first.num_computed, choice.num_computed = 12, 16
    pages.cache_full_pages(first)
    pages.cache_full_pages(choice)
    assert choice.holding.twins == []
    pages.distrust(first.holding)
    choice.num_computed = 20
    pages.cache_full_pages(choice)
    assert pages.find(first, 13) == ()
    pages.check([first.holding, choice.holding])


def test_a_choice_that_is_forked_later_offers_no_page_that_is_not_trusted() -> None:
    pages = book()
    bad, sharer = computed(pages, 12), Holding()
    pages.share(sharer, bad.holding, 3)
    pages.distrust(bad.holding)
    pages.drop(bad.holding)
    choice = _forked(pages, sharer)
    assert pages.find(bad, 13) == ()
    pages.check([sharer, choice.holding])


def test_a_choice_that_is_forked_from_one_that_lived_at_a_reset_offers_nothing() -> None:
    pages = book()
    one = computed(pages, 12)
    pages.reset_index([one.holding])
    choice = _forked(pages, one.holding)
    assert pages.describe_index()["pages"] == 0
    pages.check([one.holding, choice.holding])


def test_a_choice_offers_what_it_shares_and_the_donor_has_not_offered_yet_or_had_as_a_twin() -> None:
    pages = book()
    first, donor = computed(pages, 4), computed(pages, 4)
    donor.num_computed = 12  # the second and third page are full, and are offered with the next one
    choice = _forked(pages, donor.holding)
    assert pages.find(choice, 16) == (first.holding.pages[0], *choice.holding.pages[1:])
    assert choice.holding.twins == [0]


def test_pages_are_pinned_only_at_the_start_of_a_sequence() -> None:
    pages = book()
    one = computed(pages, 12)
    with pytest.raises(AssertionError, match=r"^pin into a holding that has pages"):
        pages.pin(one.holding, tuple(one.holding.pages))


def test_dropping_forgets_the_promise_and_keeps_the_keys() -> None:
    pages = book()
    one = computed(pages, 12)
    pages.set_aside(one.holding, 7)
    one.holding.held_tokens = 8
    keys = list(one.holding.keys)
    pages.drop(one.holding)
    assert one.holding.pages == []
    assert (one.holding.num_indexed, one.holding.num_promised, one.holding.held_tokens) == (0, 0, 0)
    assert pages.num_promised == 0
    assert one.holding.keys == keys


def test_what_is_promised_and_taken_is_promised_no_longer() -> None:
    pages = book(num_pages=17)
    one, other = Holding(), Holding()
    assert pages.grow(one, 2) is not None
    pages.set_aside(one, 4)
    pages.set_aside(other, 3)
    assert (pages.num_free, pages.num_promised, pages.num_unpromised) == (14, 5, 9)
    assert pages.grow(one, 3) is not None
    assert (one.num_promised, pages.num_promised, pages.num_unpromised) == (1, 4, 9)
    assert pages.grow(one, 6) is not None  # two more than it was promised
    assert (one.num_promised, pages.num_promised, pages.num_unpromised) == (0, 3, 7)
    pages.set_aside(one, 5)
    assert one.num_promised == 0
    pages.drop(other)
    assert (pages.num_promised, pages.num_unpromised) == (0, 10)


def test_one_event_is_written_for_each_run_of_pages_that_nobody_had_indexed() -> None:
    pages = book()
    journal = pages.journal()
    short = computed(pages, 4, PROMPT[:5])
    longer = computed(pages, 8, PROMPT[:9])  # its own first page is a copy of one that is indexed
    pages.drop(short.holding)
    taken = Holding()
    assert pages.grow(taken, pages.num_free) is not None  # evicts the first page, while the second is held
    pages.drop(taken)
    assert journal.take()[-1] == Removed((short.holding.keys[0],))
    whole = computed(pages, 12)
    first, second, third = whole.holding.keys
    assert longer.holding.keys == [first, second]
    stored = [event for event in journal.take() if isinstance(event, Stored)]
    assert [(event.keys, event.parent, event.token_ids) for event in stored] == [
        ((first,), None, PROMPT[:4]),
        ((third,), second, PROMPT[8:12]),
    ]


def test_a_journal_has_one_reader_from_the_first_page_on() -> None:
    pages = book()
    pages.journal()
    with pytest.raises(AssertionError, match=r"^the changes of the prefix index have a reader already"):
        pages.journal()
    late = book()
    computed(late, 4)
    with pytest.raises(AssertionError, match=r"^pages were indexed before anybody recorded it"):
        late.journal()


def _hold_twice(one: Holding, two: Holding) -> None:
    one.pages[0] = one.pages[1]


def _hold_anothers(one: Holding, two: Holding) -> None:
    one.pages.append(two.pages[0])


def _lose_one(one: Holding, two: Holding) -> None:
    one.pages.pop()


def _promise_one(one: Holding, two: Holding) -> None:
    one.num_promised += 1


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (_hold_twice, "a sequence holds one page twice"),
        (_hold_anothers, "page 5: 1 references, 2 holders"),
        (_lose_one, "8 pages used, 7 held by sequences"),
        (_promise_one, "0 pages promised, 1 to sequences"),
    ],
)
def test_the_check_says_which_page_is_wrong(damage: Callable[[Holding, Holding], None], finding: str) -> None:
    pages = book()
    one, two = computed(pages, 0), computed(pages, 0)
    pages.check([one.holding, two.holding])
    damage(one.holding, two.holding)
    with pytest.raises(AssertionError, match=f"^{finding}"):
        pages.check([one.holding, two.holding])
