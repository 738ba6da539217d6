"""Who stands back when computed prompts fill a prefill worker's pool, tick by tick."""

from __future__ import annotations

import pytest

from jdisagg.roles.full_pool import FullPool

STATES = ("waiting", "prealloc", "publishing", "running", "transfer")
STUCK = "waiting,publishing"
MOVES = "waiting,publishing,running"


def full_pool(**receivers: str) -> FullPool:
    """Prompts by name, of these receivers; those named c.. are computed."""
    pool = FullPool()
    for name, receiver in receivers.items():
        pool.opened(name, receiver)
        if name.startswith("c"):
            pool.told(name)
    return pool


def parks(
    pool: FullPool, *ticks: str, began_s: float = 0.0, still_s: float = 0.0, is_awaited: bool = False
) -> list[tuple[float, tuple[str, ...]]]:
    """(seconds, who may be parked) of one tick per 0.1 s; a tick is the states in which there is a prompt, comma separated.
    `still_s`: the worker is stopped for so long behind the second one."""
    seen = list[tuple[float, tuple[str, ...]]]()
    for number, states in enumerate(ticks):
        now_s = 0.1 * number + still_s * (number > 1)
        counts = dict.fromkeys(STATES, 0) | dict.fromkeys(states.split(","), 1)
        parkable = [name for name in pool._told_s | dict.fromkeys(pool._just_told) if name not in pool._parked]
        if pool.look(counts, began_s + now_s) and (found := pool.to_park(parkable, is_awaited=is_awaited)):
            seen.append((round(now_s, 1), found))
    return seen


@pytest.mark.parametrize("waits", ["waiting", "prealloc", "waiting,prealloc"])
def test_a_computed_prompt_stands_back_when_others_wait_and_nothing_moves_for_a_while(waits: str) -> None:
    found = parks(full_pool(c="d0", waits="d0"), *[f"{waits},publishing"] * 5)
    assert found == [(0.3, ("c",)), (0.4, ("c",))], "STUCK_S is 0.25"


@pytest.mark.parametrize("moves", ["waiting", "publishing", MOVES, "waiting,publishing,transfer"])
@pytest.mark.parametrize("receivers", [{"c": "d0", "waits": "d0"}, {"c0": "d0", "c1": "d1", "w0": "d0", "w1": "d1"}])
def test_between_full_receivers_nobody_stands_back_while_something_moves(moves: str, receivers: dict[str, str]) -> None:
    """One that has no memory either gains nothing by it, and the prompt is computed twice."""
    late = full_pool(**receivers)
    parks(late, *[MOVES] * 6)
    assert parks(late, *[moves] * 6, began_s=0.6) == []
    times_s = [now_s for now_s, _ in parks(late, STUCK, STUCK, moves, *[STUCK] * 4, began_s=1.2)]
    assert times_s == [0.6], "the pause begins anew behind it"


def test_for_a_receiver_that_is_not_full_others_stand_back_though_something_moves_now_and_then() -> None:
    pool = full_pool(c0="d0", c1="d0", c2="d1", waits="d1")
    assert parks(pool, *[MOVES, STUCK] * 3) == [], "a step may start it"
    pool = full_pool(c0="d0", c1="d0", waits="d1")
    assert parks(pool, MOVES, STUCK, STUCK, MOVES, STUCK, STUCK, MOVES) == [(0.5, ("c0", "c1"))], "at 0.2 s d0 had no time yet"
    pool.opened("c3", "d0")
    pool.told("c3")
    assert parks(pool, STUCK, STUCK, began_s=0.7) == [(0.1, ("c0", "c1", "c3"))], "of a full one the latest, too"


@pytest.mark.parametrize(("num_late", "is_much"), [(3, True), (2, False)])
def test_one_that_has_half_as_many_computed_prompts_here_has_enough_of_them(num_late: int, is_much: bool) -> None:
    pool = full_pool(waits="d1", too="d2", **{f"c{number}": "d0" for number in range(num_late)})
    parks(pool, *[MOVES] * 6)
    for name, receiver in (("c8", "d1"), ("c9", "d2")):
        pool.opened(name, receiver)
        pool.told(name)
    found = parks(pool, STUCK, STUCK, began_s=0.6)
    assert found == [(0.1, ("c0", "c1", "c2"))] * is_much


def test_prompts_that_were_computed_just_now_stay_for_their_receivers_answer_is_on_its_way() -> None:
    pool = full_pool(c0="d0", waits="d2")
    parks(pool, *[MOVES] * 6)
    pool.opened("c1", "d1")
    pool.told("c1")
    assert parks(pool, STUCK, STUCK, began_s=0.6) == [(0.1, ("c0",))]
    pool.closed("c0")
    assert parks(pool, STUCK, began_s=0.8) == []


def test_a_step_in_which_a_prompt_was_computed_is_no_time_that_its_receiver_had() -> None:
    pool = full_pool(w0="d0", waits="d1")
    counts = dict.fromkeys(STATES, 1)
    for number in range(10):
        assert not pool.look(counts, 2.0 * number)
    pool.told("w0")  # at the end of a step of two seconds
    assert not pool.look(counts | {"running": 0, "transfer": 0}, 20.0)
    assert pool.look(counts | {"running": 0, "transfer": 0}, 20.1)
    assert pool.to_park(["w0"], is_awaited=False) == ()


def test_a_receiver_is_full_while_a_prompt_of_its_is_parked() -> None:
    pool = full_pool(c0="d0", c3="d0", c4="d0", c1="d1", waits="d1")
    parks(pool, *[MOVES] * 6)
    pool.parked("c1")
    pool.opened("c2", "d1")
    pool.told("c2")
    assert parks(pool, STUCK, STUCK, began_s=0.6) == [], "it has no memory for the parked one"
    pool.unparked("c1")
    pool.closed("c1")
    assert parks(pool, STUCK, began_s=0.8) == [(0.0, ("c0", "c3", "c4"))]


def test_for_a_prompt_whose_receiver_holds_memory_somebody_stands_back_at_once_of_a_full_receiver_if_there_is_one() -> None:
    assert parks(full_pool(c0="d0", w="d0"), MOVES, STUCK, STUCK, is_awaited=True) == [(0.2, ("c0",))]
    pool = full_pool(c0="d0", w="d0")
    parks(pool, *[MOVES] * 6)
    pool.opened("c1", "d1")
    pool.told("c1")
    assert parks(pool, STUCK, STUCK, began_s=0.6, is_awaited=True) == [(0.1, ("c0",))]


@pytest.mark.parametrize("still_s", [0.3, 60.0])
def test_nobody_stands_back_for_a_pause_in_which_the_prefill_worker_itself_stood_still(still_s: float) -> None:
    for receiver, most in (("d0", 3), ("d1", 3)):
        found = parks(full_pool(c="d0", waits=receiver), *[STUCK] * 6, still_s=still_s)
        times_s = [now_s for now_s, _ in found]
        assert times_s == [round(still_s + 0.1 * ticks, 1) for ticks in range(most + 1, 6)], "what was said is on its way"


def test_it_remembers_nothing_of_hand_offs_that_are_over() -> None:
    pool = full_pool(c0="d0", c1="d0", waits="d1")
    parks(pool, STUCK)
    pool.parked("c0")
    pool.told("waits")
    for name in ("c0", "c1", "waits", "unknown"):
        pool.closed(name)
    pool.look(dict.fromkeys(STATES, 0), 1.0)
    assert [pool._receivers, pool._told_s, pool._parked, pool._just_told] == [{}, {}, set(), []]
