"""A time for each key, taken when it has come; those that were dropped, or set sooner, take no memory for long."""

from __future__ import annotations

from math import inf

from hypothesis import example, given
from hypothesis import strategies as st

from jdisagg.handoff.alarms import MOST_SPARE, Alarms

STEPS = st.tuples(st.sampled_from(["set", "set", "drop", "take"]), st.sampled_from("abc"), st.integers(0, 9))


@given(st.lists(STEPS, max_size=40))
@example([("set", "a", 1), ("set", "a", 9), ("take", "a", 2)])
def test_each_key_is_taken_at_the_soonest_of_its_times(steps: list[tuple[str, str, int]]) -> None:
    alarms, soonest, now_s = Alarms[str](), dict[str, float](), 0.0
    for kind, key, number in steps:
        match kind:
            case "set":
                alarms.set(key, now_s + number)
                soonest[key] = min(soonest.get(key, inf), now_s + number)
            case "drop":
                alarms.drop(key)
                soonest.pop(key, None)
            case _:
                now_s += number
                due = alarms.take_due(now_s)
                assert sorted(due) == sorted(key for key, due_s in soonest.items() if due_s <= now_s)
                times = [soonest.pop(key) for key in due]
                assert times == sorted(times)


def test_of_those_that_are_due_together_the_first_one_set_comes_first() -> None:
    alarms = Alarms[str]()
    for key in "zay":
        alarms.set(key, 1.0)
    assert alarms.take_due(0.9) == []
    assert alarms.take_due(1.0) == ["z", "a", "y"]
    assert alarms.take_due(1.0) == [], "each has to be set anew"


def test_what_has_no_time_is_never_due() -> None:
    alarms = Alarms[str]()
    alarms.set("a", inf)
    assert alarms.take_due(1e300) == []


def test_those_that_are_over_long_before_their_time_do_not_pile_up() -> None:
    alarms = Alarms[int]()
    for number in range(10_000):
        alarms.set(number, 600.0)
        alarms.set(number, 10.0)
        alarms.drop(number)
        assert len(alarms._heap) <= MOST_SPARE + 2
    alarms.set(7, 5.0)
    assert alarms.take_due(700.0) == [7]


def test_what_is_still_awaited_when_others_are_cleared_away_comes_in_its_order() -> None:
    alarms = Alarms[str]()
    for number, kept in enumerate(("third", "first", "second")):
        alarms.set(kept, (30.0, 10.0, 20.0)[number])
    for number in range(3 * MOST_SPARE):
        alarms.set(f"over {number}", 1.0 + number)
        alarms.drop(f"over {number}")
    assert alarms.take_due(15.0) == ["first"]
    assert alarms.take_due(inf) == ["second", "third"]
