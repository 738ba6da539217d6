"""How a hand-off ends at P, and that every way out frees everything: refusal, failure, first token, lease, deadline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.errors import DeadlineExceeded, HandoffLost, InvalidRequest, Overloaded
from jdisagg.core.requests import FinishReason, Output
from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import Ack, Done, HandoffId, Open, Refused, StreamEnded, Want
from tests.unit.handoff.rig import CONFIG, FIRST, LOTS, H, exports, only, opened, prefill_side, ready, request, stages


def test_release_frees_everything_once_and_makes_room_for_others() -> None:
    side = prefill_side(replace(CONFIG, transfer_buffer_bytes=80))
    other = HandoffId("other", 2)
    opened(side)
    opened(side, other)
    side.on_computed("r#1", 10)
    side.on_computed("other#2", 10)
    actions = side.release(H)
    assert actions[:4] == [act.Discard("k0"), act.Discard("k1"), act.ReleaseRequest("r#1"), act.CloseReply(H)]
    assert exports(actions[4:]) == [(0, 4), (4, 8)]
    assert side.release(H) == []
    assert side.on_message(other, StreamEnded(reason="dead"), 0.0)[-2:] == [
        act.ReleaseRequest("other#2"),
        act.CloseReply(other),
    ]
    assert side.is_idle
    assert side._exports.buffered_bytes == 0


@pytest.mark.covers("X08", "X26")
def test_events_after_the_end_are_dropped_and_counted() -> None:
    side = prefill_side()
    side.open(H, Open(request=request(), held_tokens=0, backend="fake"), 0.0)
    side.on_message(H, StreamEnded(reason="dead"), 0.0)
    assert side.on_admitted(H, 0) == []
    assert side.on_refused(H, Overloaded("full")) == []
    assert side.on_computed("r#1", 10) == []
    assert side.on_first_token("r#1", FIRST) == []
    assert side.on_published(H, ready("k0", 0, 4), 0.0) == [act.Discard("k0")]
    assert side.on_publish_failed(H, "k0", "device") == []
    assert side.on_message(H, Ack(key="k0"), 0.0) == []
    assert side.snapshot()["late"] == 6
    assert side.is_idle


def test_a_refused_request_was_never_in_the_engine() -> None:
    side = prefill_side()
    side.open(H, Open(request=request(), held_tokens=0, backend="fake"), 0.0)
    error = Overloaded("full")
    assert side.on_refused(H, error) == [act.Reply(H, Refused(error=error)), act.CloseReply(H)]
    assert side.is_idle


def test_a_request_that_fails_in_the_engine_tells_d_why() -> None:
    side = prefill_side()
    opened(side)
    error = HandoffLost("gone")
    actions = side.on_failed_requests({"r#1": error})
    assert actions[0] == act.Reply(H, Refused(error=error))
    assert actions[-1] == act.CloseReply(H)
    assert side.is_idle


def test_a_first_token_that_ends_the_request_discards_what_was_published() -> None:
    side = prefill_side()
    opened(side)
    side.on_computed("r#1", 10)
    done, *rest = side.on_first_token("r#1", replace(FIRST, finish=FinishReason.STOP))
    assert done == act.Reply(H, Done(first=Output(request_id="r", token_ids=(42,), finish=FinishReason.STOP), num_chunks=3))
    assert rest[:3] == [act.Discard("k0"), act.Discard("k1"), act.Discard("k2")]
    assert side.is_idle


def test_a_first_token_that_ends_the_request_takes_nothing_away_that_d_may_be_fetching() -> None:
    side = prefill_side()
    opened(side)
    side.on_computed("r#1", 10)
    side.on_published(H, ready("k0", 0, 4), 1.0)
    done, *rest = side.on_first_token("r#1", replace(FIRST, finish=FinishReason.STOP))
    assert isinstance(done, act.Reply)
    assert isinstance(done.message, Done)
    assert rest == [act.Discard("k1"), act.Discard("k2")]
    assert stages(side) == ["ended"]
    assert side.snapshot()["handoffs"]["r#1"]["stage"] == "ended"
    assert side.on_published(H, ready("k1", 4, 8), 1.0)[-1] == act.Discard("k1"), "it was on its way from the device"
    assert side.on_message(H, Want(begin=0, end=4, reason="x"), 2.0) == [], "the engine may have no pages of it any more"
    assert side.on_computed("r#1", 10) == []
    assert side.on_message(H, StreamEnded(reason="closed"), 2.0)[0] == act.Discard("k0")
    assert side.is_idle
    assert side._exports.buffered_bytes == 0


def test_a_request_that_its_first_token_ended_is_over_with_its_last_ack_or_lease() -> None:
    for end in (lambda side: side.on_message(H, Ack(key="k0"), 2.0), lambda side: side.tick(1.0 + CONFIG.lease_s)):
        side = prefill_side()
        opened(side)
        side.on_computed("r#1", 10)
        side.on_published(H, ready("k0", 0, 4), 1.0)
        side.on_first_token("r#1", replace(FIRST, finish=FinishReason.STOP))
        assert not side.is_idle
        assert act.ReleaseRequest("r#1") in end(side)
        assert side.is_idle


def test_silence_while_this_process_stood_still_costs_no_lease() -> None:
    side = prefill_side()
    opened(side)
    for export in side.on_computed("r#1", 8):
        assert isinstance(export, act.Export)
        side.on_published(H, ready(export.key, export.begin, export.end), 0.1)
    assert side.tick(0.2) == []
    assert side.tick(60.2) == [], "paused, with its receiver and their machine"
    assert side.tick(60.2 + CONFIG.lease_s / 2) == []
    assert "not fetched" in str(only(act.Reply, side.tick(60.2 + CONFIG.lease_s)).message)


@pytest.mark.covers("V22")
def test_the_lease_runs_from_the_last_sign_of_life() -> None:
    side = prefill_side()
    opened(side)
    side.on_computed("r#1", 10)
    assert side.tick(50.0) == [], "nothing is fetchable yet"
    side.on_published(H, ready("k0", 0, 4), 50.0)
    assert side.tick(59.9) == []
    side.on_heartbeat(H, 59.0)
    assert side.tick(68.9) == []
    side.on_message(H, LOTS, 68.9)
    assert side.tick(78.8) == []
    actions = side.tick(78.9)
    refused = only(act.Reply, actions).message
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, HandoffLost)
    assert act.Discard("k0") in actions
    assert act.ReleaseRequest("r#1") in actions
    assert side.is_idle


def test_the_deadline_frees_everything() -> None:
    side = prefill_side()
    opened(side, credit=False)
    assert side.tick(99.9) == []
    refused = only(act.Reply, side.tick(100.0)).message
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, DeadlineExceeded)
    assert side.is_idle


def test_an_open_that_makes_no_sense_is_refused() -> None:
    side = prefill_side()
    actions = side.open(H, Open(request=request(), held_tokens=11, backend="fake"), 0.0)
    refused = only(act.Reply, actions).message
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, InvalidRequest)
    assert side.is_idle
    opened(side)
    again = only(act.Reply, side.on_message(H, Open(request=request(), held_tokens=0, backend="fake"), 0.0)).message
    assert isinstance(again, Refused)
    assert side.is_idle
