"""Who stands back when computed prompts fill a prefill worker's pool, tick by tick."""

from __future__ import annotations

import pytest

from jdisagg.handoff.full_pool import FullPool
from jdisagg.handoff.live_outbound import LiveOutbound
from jdisagg.handoff.messages import HandoffId
from jdisagg.handoff.outbound import Outbound, OutboundStage
from tests.unit.handoff.rig import request

STATES = ("waiting", "prealloc", "publishing", "running", "transfer")
STUCK = "waiting,publishing"
MOVES = "waiting,publishing,running"


class Pool:
    """P's hand-offs by name, which is one of these receivers'; those named c.. are computed, and their receivers have shown no
    memory."""

    def __init__(self, **receivers: str) -> None:
        self.live = LiveOutbound()
        self.full = FullPool()
        for name, receiver in receivers.items():
            self.open(name, receiver)

    def open(self, name: str, receiver: str) -> None:
        record = Outbound(HandoffId(name, 1), request(), 0, 0.0, 4, receiver)
        self.live.add(record)
        record.move(OutboundStage.COMPUTING)
        if name.startswith("c"):
            self.tell(name)

    def of(self, name: str) -> Outbound:
        return self.live.the_one_of(f"{name}#1")

    def tell(self, name: str) -> None:
        self.of(name).move(OutboundStage.COMPUTED)
        self.live.begin(self.of(name))

    def await_one(self) -> None:
        """Some receiver holds memory for a prompt that is not computed."""
        self.open("w9", "d9")
        self.of("w9").credit_bytes = 1
        self.live.begin(self.of("w9"))

    def close(self, name: str) -> None:
        assert self.live.take(HandoffId(name, 1)) is not None

    def to_park(self, counts: dict[str, int], now_s: float) -> tuple[str, ...]:
        return tuple(name.partition("#")[0] for name in self.full.to_park(self.live, counts, now_s))


def parks(pool: Pool, *ticks: str, began_s: float = 0.0, still_s: float = 0.0) -> list[tuple[float, tuple[str, ...]]]:
    """(seconds, who may be parked) of one tick per 0.1 s; a tick is the states in which there is a prompt, comma separated.
    `still_s`: the worker is stopped for so long behind the second one."""
    seen = list[tuple[float, tuple[str, ...]]]()
    for number, states in enumerate(ticks):
        now_s = 0.1 * number + still_s * (number > 1)
        counts = dict.fromkeys(STATES, 0) | dict.fromkeys(states.split(","), 1)
        if found := pool.to_park(counts, began_s + now_s):
            seen.append((round(now_s, 1), found))
    return seen


@pytest.mark.parametrize("waits", ["waiting", "prealloc", "waiting,prealloc"])
def test_a_computed_prompt_stands_back_when_others_wait_and_nothing_moves_for_a_while(waits: str) -> None:
    found = parks(Pool(c="d0", waits="d0"), *[f"{waits},publishing"] * 5)
    assert found == [(0.3, ("c",)), (0.4, ("c",))], "STUCK_S is 0.25"


@pytest.mark.parametrize("moves", ["waiting", "publishing", MOVES, "waiting,publishing,transfer"])
@pytest.mark.parametrize("receivers", [{"c": "d0", "waits": "d0"}, {"c0": "d0", "c1": "d1", "w0": "d0", "w1": "d1"}])
def test_between_full_receivers_nobody_stands_back_while_something_moves(moves: str, receivers: dict[str, str]) -> None:
    """One that has no memory either gains nothing by it, and the prompt is computed twice."""
    late = Pool(**receivers)
    parks(late, *[MOVES] * 6)
    assert parks(late, *[moves] * 6, began_s=0.6) == []
    times_s = [now_s for now_s, _ in parks(late, STUCK, STUCK, moves, *[STUCK] * 4, began_s=1.2)]
    assert times_s == [0.6], "the pause begins anew behind it"


def test_for_a_receiver_that_is_not_full_others_stand_back_though_something_moves_now_and_then() -> None:
    pool = Pool(c0="d0", c1="d0", c2="d1", waits="d1")
    assert parks(pool, *[MOVES, STUCK] * 3) == [], "a step may start it"
    pool = Pool(c0="d0", c1="d0", waits="d1")
    assert parks(pool, MOVES, STUCK, STUCK, MOVES, STUCK, STUCK, MOVES) == [(0.5, ("c0", "c1"))], "at 0.2 s d0 had no time yet"
    pool.open("c3", "d0")
    assert parks(pool, STUCK, STUCK, began_s=0.7) == [(0.1, ("c0", "c1", "c3"))], "of a full one the latest, too"


@pytest.mark.parametrize(("num_late", "is_much"), [(3, True), (2, False)])
def test_one_that_has_half_as_many_computed_prompts_here_has_enough_of_them(num_late: int, is_much: bool) -> None:
    pool = Pool(waits="d1", too="d2", **{f"c{number}": "d0" for number in range(num_late)})
    parks(pool, *[MOVES] * 6)
    for name, receiver in (("c8", "d1"), ("c9", "d2")):
        pool.open(name, receiver)
    found = parks(pool, STUCK, STUCK, began_s=0.6)
    assert found == [(0.1, ("c0", "c1", "c2"))] * is_much


def test_prompts_that_were_computed_just_now_stay_for_their_receivers_answer_is_on_its_way() -> None:
    pool = Pool(c0="d0", waits="d2")
    parks(pool, *[MOVES] * 6)
    pool.open("c1", "d1")
    assert parks(pool, STUCK, STUCK, began_s=0.6) == [(0.1, ("c0",))]
    pool.close("c0")
    assert parks(pool, STUCK, began_s=0.8) == []


def test_a_step_in_which_a_prompt_was_computed_is_no_time_that_its_receiver_had() -> None:
    pool = Pool(w0="d0", waits="d1")
    counts = dict.fromkeys(STATES, 1)
    for number in range(10):
        assert pool.to_park(counts, 2.0 * number) == ()
    pool.tell("w0")  # at the end of a step of two seconds
    counts |= {"running": 0, "transfer": 0}
    assert [pool.to_park(counts, now_s) for now_s in (20.0, 20.1, 20.2, 20.3)] == [(), (), (), ("w0",)]


def test_a_receiver_is_full_while_a_prompt_of_its_is_parked() -> None:
    pool = Pool(c0="d0", c3="d0", c4="d0", c1="d1", waits="d1")
    parks(pool, *[MOVES] * 6)
    pool.of("c1").park()
    pool.open("c2", "d1")
    assert parks(pool, STUCK, STUCK, began_s=0.6) == [], "it has no memory for the parked one"
    pool.of("c1").move(OutboundStage.COMPUTED)
    pool.close("c1")
    assert parks(pool, STUCK, began_s=0.8) == [(0.0, ("c0", "c3", "c4"))]


def test_for_a_prompt_whose_receiver_holds_memory_somebody_stands_back_at_once_of_a_full_receiver_if_there_is_one() -> None:
    pool = Pool(c0="d0", w="d0")
    pool.await_one()
    assert parks(pool, MOVES, STUCK, STUCK) == [(0.2, ("c0",))]
    pool = Pool(c0="d0", w="d0")
    parks(pool, *[MOVES] * 6)
    pool.await_one()
    pool.open("c1", "d1")
    assert parks(pool, STUCK, STUCK, began_s=0.6) == [(0.1, ("c0",))]


@pytest.mark.parametrize("still_s", [0.3, 60.0])
def test_nobody_stands_back_for_a_pause_in_which_the_prefill_worker_itself_stood_still(still_s: float) -> None:
    for receiver, most in (("d0", 3), ("d1", 3)):
        found = parks(Pool(c="d0", waits=receiver), *[STUCK] * 6, still_s=still_s)
        times_s = [now_s for now_s, _ in found]
        assert times_s == [round(still_s + 0.1 * ticks, 1) for ticks in range(most + 1, 6)], "what was said is on its way"
