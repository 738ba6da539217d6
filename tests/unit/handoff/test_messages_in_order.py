"""Messages at the stage they belong to, and at another: what P and D make of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.requests import Output
from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import Accepted, Done, Open, Parked, PrefillToDecode, Refused, Started
from tests.unit.handoff.rig import FIRST, H2, LEFT, NEVER, H, decode_side, only, prefill_side, ready, request, stages


def test_pages_are_reserved_when_p_has_begun_and_not_before_it_has_answered() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    assert side.on_message(H, Started(), 0.0) == [act.PeerReady("r")]
    assert stages(side) == ["accepted"]


def test_a_prompt_that_stood_back_owes_no_piece_until_it_was_computed_again() -> None:
    side = decode_side(NEVER)
    side.start(request(deadline_s=1000.0), 0, ("p",), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_message(H, Done(first=FIRST, num_chunks=3), 0.0)
    assert side.on_message(H, Parked(), 0.0) == []
    side.on_reserved("r", 1.0)
    assert side.tick(90.0) == [], "it waits for its second turn"
    side.on_message(H, ready("a", 0, 4), 90.0)
    side.on_arrived(H, "a", 90.0)
    assert side.tick(99.9) == []
    assert only(act.Recovered, side.tick(100.0)).rung == "reconnect", "from now on it owes the rest"


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        ([Started()], "Started at stage opening"),
        ([LEFT, Parked()], "Parked at stage asked"),
        ([Accepted(cached_tokens=0), Parked()], "Parked at stage accepted"),
        ([Accepted(cached_tokens=0), Accepted(cached_tokens=0)], "Accepted at stage accepted"),
        (
            [Accepted(cached_tokens=0), Done(first=Output(request_id="r#1"), num_chunks=0)],
            "Done without a token, or without finish on the last one",
        ),
    ],
)
def test_a_message_at_the_wrong_stage_is_named_and_the_next_worker_gets_its_time(
    messages: list[PrefillToDecode], cause: str
) -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p", "q"), 0.0)
    lost = [action for message in messages for action in side.on_message(H, message, 20.0)]
    assert only(act.Recovered, lost).cause == f"protocol: {cause}"
    side.on_message(H2, LEFT, 20.0)
    assert side.tick(29.9) == []
    assert only(act.Fail, side.tick(30.0)).request_id == "r"


def test_an_open_that_makes_no_sense_is_answered_on_its_stream() -> None:
    side = prefill_side()
    reply, close = side.open(H, Open(request=request(), held_tokens=11, backend="fake"), 0.0)
    assert isinstance(reply, act.Reply)
    assert isinstance(reply.message, Refused)
    assert (reply.handoff, close) == (H, act.CloseReply(H))
    assert str(reply.message.error) == "request r: held_tokens is 11, wanted 0 to 10"


def test_choices_of_one_prompt_are_separate_requests_at_p() -> None:
    opening = Open(request=replace(request(), fork_group="g"), held_tokens=0, backend="fake")
    assert only(act.Admit, prefill_side().open(H, opening, 0.0)).request.fork_group == ""
