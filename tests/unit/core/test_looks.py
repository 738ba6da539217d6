"""Who looks again and again knows when its process stood still, and its long steps are none of that."""

from __future__ import annotations

import pytest

from jdisagg.core.looks import RECENT_LOOKS, STOOD_STILL_S, Looks


def still_s(*looks_s: float, num_recent: int = RECENT_LOOKS) -> list[float]:
    looks = Looks(num_recent=num_recent)
    return [looks.stood_still_s(now_s) for now_s in looks_s]


def test_what_passed_since_the_last_look_is_a_standstill_when_it_is_long() -> None:
    assert still_s(5.0, 5.1, 5.1 + STOOD_STILL_S - 0.01) == [0.0] * 3, "nor is the time before the first look"
    assert still_s(5.0, 5.1, 65.1, 65.2) == pytest.approx([0.0, 0.0, 60.0, 0.0])


def test_one_that_needs_seconds_for_each_step_looks_as_late_always() -> None:
    assert still_s(0.0, 3.0, 6.0, 11.9, 17.9) == [0.0, 3.0, 0.0, 0.0, 0.0]
    assert still_s(0.0, 3.0, 6.0, 12.0) == [0.0, 3.0, 0.0, 6.0], "twice as long as the longest of late"


def test_one_that_looks_by_a_timer_stands_still_as_often_as_it_is_late() -> None:
    assert still_s(0.0, 3.0, 6.0, 7.0, 7.9, num_recent=0) == [0.0, 3.0, 3.0, 1.0, 0.0]


def test_long_steps_are_forgotten_behind_short_ones() -> None:
    short = [3.0 + 0.1 * number for number in range(1, RECENT_LOOKS + 1)]
    assert still_s(0.0, 3.0, *short, short[-1] + 1.5)[-1] == pytest.approx(1.5)
    assert still_s(0.0, 3.0, *short[:-1], short[-2] + 1.5)[-1] == 0.0


@pytest.mark.parametrize("looks_s", [(), (7.5,)])
def test_the_time_awake_is_that_without_standstills(looks_s: tuple[float, ...]) -> None:
    looks = Looks(0.25)
    assert looks.awake_s(7.0) == 0.0
    for now_s in (7.1, 7.2, *(now_s + 0.1 for now_s in looks_s)):
        looks.stood_still_s(now_s)
    assert looks.awake_s(60.2) == pytest.approx(0.2), "whoever looked meanwhile, for so long it stood still"
    assert looks.awake_s(60.3) == pytest.approx(0.3)
