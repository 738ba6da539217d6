"""A hedge of which one side, or both, will not have the request: full, unreachable, or finding it wrong."""

from __future__ import annotations

import pytest

from jdisagg.core.errors import InvalidRequest, NumericalError, Overloaded
from jdisagg.core.requests import FinishReason, Output
from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import Accepted, Awake, Done, HandoffId, PrefillToDecode, Refused, StreamEnded
from tests.unit.handoff.hedge_rig import H3, QUIET, SILENCE, closed, hedged, outcome, say
from tests.unit.handoff.rig import H2, LEFT, NEVER, H, none_of, only, ready

FULL, UNREACHABLE = Refused(error=Overloaded("full")), StreamEnded(reason="unreachable")


def test_a_quiet_one_that_only_wakes_up_to_refuse_leaves_the_request_to_the_other() -> None:
    side = hedged()
    moved = say(side, H, FULL)
    assert outcome(moved) == ("moved", "p", "q")
    assert closed(moved) == [H], "the hedge goes on"
    assert say(side, H, Awake()) == []
    say(side, H2, UNREACHABLE)
    assert only(act.OpenStream, side.tick(2.0)).peer == "p", "it may have room by then"
    final = only(act.Fail, say(hedged(), H, Refused(error=NumericalError("NaN"))))
    assert final.error.message == "NaN", "nobody else would get a number either"


@pytest.mark.parametrize("answer", [FULL, Refused(error=InvalidRequest("its context is short"))])
def test_where_the_other_is_quiet_itself_a_third_is_asked_and_has_its_time(answer: Refused) -> None:
    side = hedged("p", "q", "s")
    say(side, H2, QUIET)
    assert only(act.OpenStream, say(side, H, answer, now_s=50.0)).peer == "s"
    say(side, H3, LEFT, now_s=50.0)
    assert side.tick(59.0) == []
    assert outcome(side.tick(60.1))[2] == "s"


def test_who_was_given_up_for_its_silence_is_named_when_time_is_over() -> None:
    side = hedged(config=NEVER)
    say(side, H, FULL)
    say(side, H2, FULL, now_s=100.0)
    assert only(act.Fail, side.tick(101.0)).error.message.endswith("without a prefill worker; p was quiet, q was full")


SHORT = InvalidRequest("its context is short")
NO_TOKEN = Done(first=Output(request_id="r#1", finish=FinishReason.ERROR, error=SHORT), num_chunks=0)


@pytest.mark.parametrize("answer", [Refused(error=SHORT), NO_TOKEN])
def test_a_quiet_one_that_wakes_up_to_find_the_request_wrong_leaves_it_to_the_other_for_good(answer: Refused | Done) -> None:
    side = hedged()
    moved = say(side, H, answer)
    assert (outcome(moved), closed(moved)) == (("moved", "p", "q"), [H])
    assert only(act.Recovered, moved).cause == "refused: its context is short; q was asked meanwhile"
    assert none_of(act.OpenStream, say(side, H2, QUIET)), "it is not asked again"
    assert only(act.ComputeLocally, say(side, H2, UNREACHABLE)).held_tokens == 4


@pytest.mark.parametrize(
    "first", [(H, StreamEnded(reason="closed", error=SHORT)), (H, Refused(error=SHORT)), (H2, Refused(error=SHORT))]
)
def test_when_the_quiet_one_and_the_other_find_it_wrong_the_request_ends_with_that(
    first: tuple[HandoffId, PrefillToDecode],
) -> None:
    side, (handoff, message) = hedged(config=NEVER), first
    say(side, handoff, message)
    last = H2 if handoff is H else H
    assert only(act.Fail, say(side, last, Refused(error=SHORT))).error is SHORT


@pytest.mark.parametrize("answer", [FULL, UNREACHABLE, Refused(error=InvalidRequest("its context is short"))])
def test_one_without_room_or_hope_leaves_the_request_with_the_quiet_one(answer: Refused | StreamEnded) -> None:
    side = hedged()
    assert outcome(say(side, H2, answer)) == ("refused", "p", "q")
    assert side.snapshot()["handoffs"]["r"]["doubted_peer"] == ""
    assert say(side, H, SILENCE), "what was to come without a hedge comes"


def test_who_had_no_room_is_asked_at_the_next_quiet_spell_and_who_failed_is_not() -> None:
    side = hedged()
    say(side, H2, FULL)
    assert only(act.OpenStream, say(side, H, QUIET)).peer == "q"
    assert outcome(say(side, H3, FULL)) == ("refused", "p", "q")
    side = hedged()
    say(side, H2, UNREACHABLE)
    assert none_of(act.OpenStream, say(side, H, QUIET)), "nobody else is left to ask"


def test_the_next_of_several_is_asked_when_one_has_no_room() -> None:
    side = hedged("p", "q", "s")
    asked = say(side, H2, Refused(error=Overloaded("full")))
    assert (only(act.OpenStream, asked).peer, closed(asked)) == ("s", [H2])
    assert side.tick(10.9) == [], "it has its time to answer"
    assert none_of(act.Hedged, asked), "it is not over"
    assert outcome(say(side, H3, Accepted(cached_tokens=0), ready("x", 4, 8))) == ("moved", "p", "s")
