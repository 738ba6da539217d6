"""What prefill workers are taken to compute in a second, by what they say: only what is proven makes a difference."""

from __future__ import annotations

import pytest

from jdisagg.core.speed import ALIKE, Speed, taken_for

FULL = Speed(9_500, 10_000)  # of one whose steps are full
SHORT = Speed(1_500, 80_000)  # of its like, whose prompts are short
SLOW = Speed(950, 1_000)


def test_who_has_said_nothing_is_taken_for_one_of_the_others() -> None:
    assert taken_for([]) == []
    assert len(set(taken_for([None, None, None]))) == 1
    assert taken_for([SLOW, None, SLOW]) == [1_000, 1_000, 1_000]
    assert taken_for([FULL, FULL, SLOW, None]) == [9_500, 9_500, 1_000, 9_500]


@pytest.mark.parametrize("told", [[FULL, SHORT], [SHORT, FULL, SHORT, SHORT], [FULL, SHORT, Speed(11_000, 11_900), None]])
def test_short_prompts_and_small_differences_make_nobody_slower(told: list[Speed | None]) -> None:
    assert len(set(taken_for(told))) == 1


@pytest.mark.parametrize("others", [[FULL], [FULL, FULL], [FULL, SHORT], [SHORT, SHORT, None]])
def test_who_is_proven_to_be_slower_is_taken_for_as_fast_as_it_can_be(others: list[Speed | None]) -> None:
    *fast, slow = taken_for([*others, SLOW])
    assert slow == SLOW.most
    assert len(set(fast)) == 1
    assert fast[0] >= SHORT.least


def test_who_is_proven_to_be_faster_is_taken_for_no_faster_than_that() -> None:
    assert taken_for([SLOW, SLOW, FULL]) == [1_000, 1_000, 9_500]
    assert taken_for([SLOW, SLOW, SHORT]) == [1_000, 1_000, 1_500]


@pytest.mark.parametrize(("share", "taken"), [(ALIKE, 100), (ALIKE * 1.01, 125), (1 / ALIKE, 100), (0.99 / ALIKE, 80)])
def test_what_is_no_difference_ends_somewhere(share: float, taken: int) -> None:
    like = Speed(100, 100)
    assert round(taken_for([like, like, Speed(100 * share, 100 * share)])[2]) == pytest.approx(taken, abs=1.5)
