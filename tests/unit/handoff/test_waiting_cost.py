"""A tick costs no more for thousands that only wait: instructions are counted, not time."""

from __future__ import annotations

import pytest

from jdisagg.core.errors import Overloaded
from jdisagg.handoff import actions as act
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.messages import Accepted, HandoffId, Open, PrefillToDecode, Refused, Started
from jdisagg.handoff.prefill_side import PrefillSide
from tests.unit.handoff.rig import FIRST, LOTS, H, decode_side, none_of, only, prefill_side, ready, request
from tests.unit.sched.test_cost import Work, work_of

FEW, MANY = 100, 3000
STUCK = {"waiting": 1, "prealloc": 0, "publishing": 1, "running": 0, "transfer": 0}
FULL = Refused(error=Overloaded("full", retry_after_s=30.0))


def asking(num_waiting: int, answers: tuple[PrefillToDecode, ...]) -> DecodeSide:
    """D with one that gets its KV, and behind it so many that P has given those answers."""
    side = decode_side()
    side.start(request(), 0, ("p",), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    side.on_message(H, ready("a", 0, 4), 0.0)
    for serial in range(2, num_waiting + 2):
        side.start(request(request_id=f"r{serial}"), 0, ("p",), 0.0)
        for message in answers:
            side.on_message(HandoffId(f"r{serial}", serial), message, 0.0)
    return side


def works(side: DecodeSide | PrefillSide) -> list[Work]:
    """Of ticks that have nothing to do."""
    found: list[Work] = []
    for number in range(8):
        now_s = number / 100

        def step(now_s: float = now_s) -> None:
            if isinstance(side, DecodeSide):
                side.look(now_s)
            else:
                assert side.to_park(STUCK, now_s) == (("r#2",) if now_s else ()), "D has pages for another one"
            assert side.tick(now_s) == []

        found.append(work_of(step))
    return found


@pytest.mark.parametrize("answers", [(), (Accepted(cached_tokens=0),), (Accepted(cached_tokens=0), Started()), (FULL,)])
def test_a_tick_of_d_does_the_same_work_with_3000_waiting_as_with_100(answers: tuple[PrefillToDecode, ...]) -> None:
    many = asking(MANY, answers)
    assert works(many) == works(asking(FEW, answers))
    assert len(many.snapshot()["handoffs"]) == MANY + 1
    fetch_s = 6.0
    assert only(act.Fetch, many.tick(fetch_s)).ready.key == "a", "the one with pages is looked at"


def asked(num_waiting: int) -> PrefillSide:
    """P with one whose D has pages, one whose D has a token alone, and so many behind them in its queue."""
    side = prefill_side()
    for serial in range(1, num_waiting + 3):
        handoff = HandoffId("r", serial)
        side.open(handoff, Open(request=request(), held_tokens=0, backend="fake"), 0.0)
        side.on_admitted(handoff, 0)
    side.on_message(H, LOTS, 0.0)
    side.on_first_token("r#2", FIRST)
    return side


def test_a_tick_of_p_does_the_same_work_with_3000_waiting_as_with_100() -> None:
    many = asked(MANY)
    assert works(many) == works(asked(FEW))
    assert many.num_live == MANY + 2
    assert none_of(act.Reply, many.tick(99.9))
    assert len([a for a in many.tick(100.0) if isinstance(a, act.Reply)]) == MANY + 2, "the deadline of all"
    assert many.is_idle
