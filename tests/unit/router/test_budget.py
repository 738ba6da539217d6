"""The replay budget: one death is always affordable, deaths over and over are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.router.recovery import WINDOW_S, ReplayBudget


def test_everything_alive_may_be_replayed_at_once_and_the_floor_on_top() -> None:
    budget = ReplayBudget(share=0.0, floor=3)
    assert sum(budget.take(10, 0.0) for _ in range(20)) == 13
    assert not budget.take(10, 0.0)
    assert budget.take(11, 0.0)  # one more alive, one more allowed


def test_it_comes_back_by_its_size_in_a_window_and_by_a_share_of_new_requests() -> None:
    budget = ReplayBudget(share=0.25, floor=4)
    assert sum(budget.take(0, 0.0) for _ in range(9)) == 4
    assert sum(budget.take(0, WINDOW_S / 2) for _ in range(9)) == 2
    for _ in range(7):
        budget.admitted()
    assert sum(budget.take(0, WINDOW_S / 2) for _ in range(9)) == 1  # 7 / 4
    assert sum(budget.take(0, 100 * WINDOW_S) for _ in range(9)) == 4  # and never beyond its size


def test_what_was_spent_when_many_were_alive_is_over_within_a_minute_when_few_are() -> None:
    budget = ReplayBudget(share=0.5, floor=64)
    assert sum(budget.take(2000, 0.0) for _ in range(1000)) == 1000
    assert not budget.take(20, 0.0)
    assert sum(budget.take(20, WINDOW_S / 3) for _ in range(100)) == 0, "a third of 2,064 is over"
    assert sum(budget.take(20, WINDOW_S) for _ in range(100)) == 84


def test_how_many_were_alive_once_is_forgotten_when_that_is_over() -> None:
    budget = ReplayBudget(share=0.5, floor=64)
    assert sum(budget.take(10_000, 0.0) for _ in range(10_000)) == 10_000
    for _ in range(100):
        budget.admitted()
    begin_s = 100 * WINDOW_S
    granted = sum(budget.take(10, begin_s + WINDOW_S * i / 4000) for i in range(4000))
    assert granted == 2 * 74 - 1, "a full bucket, and what a minute gives back"


@given(
    st.lists(st.tuples(st.sampled_from(["new", "replay"]), st.floats(0, 1)), max_size=200),
    st.floats(0, 1),
    st.integers(0, 5),
)
def test_replays_never_exceed_the_size_and_what_leaked(steps: list[tuple[str, float]], share: float, floor: int) -> None:
    budget, now_s, num_new, num_replays, live = ReplayBudget(share=share, floor=floor), 0.0, 0, 0, 4
    for what, pause_s in steps:
        now_s += pause_s
        if what == "new":
            budget.admitted()
            num_new += 1
        else:
            num_replays += budget.take(live, now_s)
        size = floor + live
        assert num_replays <= size + share * num_new + now_s * size / WINDOW_S + 1e-6


@pytest.mark.parametrize("now_s", [5.0, 1.0])
def test_a_clock_that_stands_or_goes_back_leaks_nothing(now_s: float) -> None:
    budget = ReplayBudget(share=0.0, floor=1)
    assert budget.take(0, 5.0)
    assert not budget.take(0, now_s)


def test_a_new_request_leaves_no_less_than_there_was() -> None:
    budget = ReplayBudget(share=0.5, floor=1)
    budget.admitted()
    assert budget.take(0, 0.0)
