"""Prefill workers that are full or drain are waited for: in growing pauses, without pages, and without being called lost."""

from __future__ import annotations

import pytest

from jdisagg.core.errors import HandoffLost, InvalidRequest, Overloaded, Unavailable
from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import Accepted, HandoffId, Refused, Started, StreamEnded
from tests.unit.handoff.rig import DEAD, H2, NEVER, H, decode_side, none_of, only, request, stages


def test_a_pause_for_another_worker_that_was_full_is_no_reconnection_to_the_one_that_was_lost() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Refused(error=Overloaded("full")), 1.0)
    lost = only(act.Recovered, side.on_message(H2, DEAD, 1.0))
    assert (lost.rung, lost.peer) == ("other_prefill", "q")
    assert only(act.OpenStream, side.tick(2.0)).peer == "p"


def test_a_full_worker_is_passed_over_and_asked_again_with_growing_pauses() -> None:
    side = decode_side()
    full = Refused(error=Overloaded("full"))
    side.start(request(), 0, ("p", "q"), 0.0)
    assert only(act.OpenStream, side.on_message(H, full, 0.0)).peer == "q"
    now_s, pauses = 0.0, []
    for serial in range(2, 14, 2):
        assert none_of(act.OpenStream, side.on_message(HandoffId("r", serial), full, now_s))
        began_s = now_s
        while none_of(act.OpenStream, actions := side.tick(now_s)):
            now_s += 0.05
        pauses.append(round(now_s - began_s, 2))
        assert only(act.OpenStream, actions).peer == "p"
        assert only(act.OpenStream, side.on_message(HandoffId("r", serial + 1), full, now_s)).peer == "q"
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0], abs=0.051)


DRAINING = Refused(error=Unavailable("draining"))


def test_a_draining_worker_is_waited_for_when_nobody_else_may_compute_the_prompt() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p", "q"), 0.0)
    assert only(act.OpenStream, side.on_message(H, DRAINING, 0.0)).peer == "q"
    actions = side.on_message(H2, DRAINING, 0.0)
    assert actions == [act.CancelFetch(H2), act.CloseStream(H2)], "neither a failure nor a rung"
    assert stages(side) == ["waiting"]
    assert side.tick(0.09) == []
    third = HandoffId("r", 3)
    assert only(act.OpenStream, side.tick(0.1)).peer == "p"
    assert side.on_message(third, DRAINING, 0.1)[-1:] != []
    side.on_message(HandoffId("r", 4), Accepted(cached_tokens=0), 0.2)
    assert stages(side) == ["accepted"], "another one in its place"


def test_a_draining_worker_that_ended_with_none_in_its_place_is_asked_once_more_and_given_up() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p",), 0.0)
    side.on_message(H, DRAINING, 0.0)
    gone = StreamEnded(reason="unreachable", error=Unavailable("prefill peer p: Hello: UNAVAILABLE"))
    assert only(act.OpenStream, side.tick(0.1)).handoff == H2
    assert only(act.Recovered, side.on_message(H2, gone, 0.1)).rung == "reconnect"
    assert only(act.OpenStream, side.tick(0.5)).peer == "p"
    assert isinstance(only(act.Fail, side.on_message(HandoffId("r", 3), gone, 0.5)).error, HandoffLost)


def test_a_draining_worker_is_left_at_once_when_the_prompt_may_be_computed_here() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    other = side.on_message(H, DRAINING, 0.0)
    assert only(act.OpenStream, other).peer == "q"
    assert only(act.Recovered, other).cause == "refused: draining"
    assert only(act.ComputeLocally, side.on_message(H2, DRAINING, 0.0)).request_id == "r"


@pytest.mark.parametrize("full", [Refused(error=Overloaded("it stops")), DEAD])
@pytest.mark.parametrize("had_begun", [True, False])
def test_no_pages_are_reserved_in_a_pause_for_one_that_had_begun(full: Refused | StreamEnded, had_begun: bool) -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p",), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    if had_begun:
        assert side.on_message(H, Started(), 0.0) == [act.PeerReady("r")]
    paused = side.on_message(H, full, 0.0)
    assert [a for a in paused if isinstance(a, act.PeerReady)] == [act.PeerReady("r", is_ready=False)] * had_begun
    assert stages(side) == ["waiting"]


def test_one_for_which_the_request_is_wrong_is_not_asked_again_while_the_other_is_full() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("short", "q"), 0.0)
    side.on_message(H, Refused(error=InvalidRequest("short")), 0.0)
    side.on_message(H2, Refused(error=Overloaded("full")), 0.0)
    assert only(act.OpenStream, side.tick(1.0)).peer == "q"


def test_a_full_worker_is_waited_for_when_the_other_one_is_lost() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Refused(error=Overloaded("full")), 0.0)
    assert none_of(act.Fail, side.on_message(H2, DEAD, 0.0))
    assert only(act.OpenStream, side.tick(0.1)).peer == "p"
    assert isinstance(only(act.Fail, side.on_message(HandoffId("r", 3), DEAD, 0.2)).error, HandoffLost)


def test_all_whose_pause_is_over_at_once_go_on_at_once() -> None:
    side = decode_side()
    for serial, request_id in enumerate("rs", 1):
        side.start(request(request_id=request_id), 0, ("p",), 0.0)
        side.on_message(HandoffId(request_id, serial), Refused(error=Overloaded("full")), 0.0)
    opened = [action.handoff.request_id for action in side.tick(1.0) if isinstance(action, act.OpenStream)]
    assert opened == ["r", "s"]
