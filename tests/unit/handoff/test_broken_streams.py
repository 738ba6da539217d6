"""What costs a hand-off its stream: silence, and messages that make no sense; and what comes of a stream that is over."""

from __future__ import annotations

import pytest

from jdisagg.core.errors import DeadlineExceeded
from jdisagg.core.requests import FinishReason, Output
from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import Accepted, Agreed, ChunkReady, Done, HandoffId, StreamEnded
from tests.unit.handoff.rig import (
    DEAD,
    FIRST,
    H2,
    LEFT,
    NEVER,
    H,
    decode_side,
    none_of,
    only,
    ready,
    request,
    stages,
    transferring,
)


@pytest.mark.covers("X26", "C05", "X24")
def test_what_comes_for_an_older_stream_or_an_ended_handoff_is_dropped_and_counted() -> None:
    side = decode_side()
    piece = transferring(side, ("p", "q"))
    side.on_message(H, DEAD, 1.0)
    assert side.on_message(H, piece, 1.0) == []
    assert side.on_message(H, Done(first=FIRST, num_chunks=1), 1.0) == []
    assert side.on_arrived(H, "a", 1.0) == []
    assert side.on_failed(H, "a", "timeout", 1.0) == []
    assert side.on_message(H, DEAD, 1.0) == [], "the stream end of an older stream"
    assert side.snapshot()["late"] == 4
    side.release("r")
    assert side.on_message(H2, Accepted(cached_tokens=0), 1.0) == []
    assert side.on_reserved("r", 1.0) == []
    assert side.is_idle


def test_release_is_idempotent_in_every_stage() -> None:
    side = decode_side()
    side.start(request(), 0, ("p",), 0.0)
    assert side.release("r") == [act.CancelFetch(H), act.CloseStream(H)]
    assert side.release("r") == []
    side.start(request(), 0, ("p",), 0.0)
    side.on_message(H2, StreamEnded(reason="unreachable"), 0.0)
    assert side.release("r") == [], "a waiting hand-off has no stream"
    assert side.is_idle


def test_the_deadline_holds_in_every_stage() -> None:
    side = decode_side()
    transferring(side)
    assert side.tick(4.9) == []
    actions = side.tick(100.0)
    error = only(act.Fail, actions).error
    assert isinstance(error, DeadlineExceeded)
    assert "transferring" in error.message
    assert act.CloseStream(H) in actions
    side.start(request(), 0, ("p",), 0.0)
    side.on_message(H2, StreamEnded(reason="unreachable"), 99.99)
    assert isinstance(only(act.Fail, side.tick(100.0)).error, DeadlineExceeded), "also while it pauses"
    side.start(request(), 0, ("p",), 0.0)
    assert isinstance(
        only(act.Fail, side.on_message(HandoffId("r", 3), StreamEnded(reason="deadline"), 1.0)).error, DeadlineExceeded
    )


@pytest.mark.covers("X13")
def test_silence_is_noticed_at_each_stage() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, LEFT, 0.0)
    assert side.tick(9.9) == []
    assert "no answer" in only(act.Recovered, side.tick(10.0)).cause
    side.on_message(H2, Accepted(cached_tokens=0), 10.0)
    side.on_reserved("r", 10.0)
    side.on_message(H2, ready("a", 0, 4), 10.0)
    assert side.tick(15.9) == []
    assert only(act.Recovered, side.tick(16.0)).rung == "refetch", "a fetch that never answered"
    side.on_arrived(H2, "a", 17.0)
    side.on_message(H2, Done(first=FIRST, num_chunks=3), 17.0)
    side.on_message(H2, ready("b", 4, 8), 20.0)
    side.on_arrived(H2, "b", 21.0)
    assert side.tick(30.9) == []
    assert only(act.ComputeLocally, side.tick(31.0)).held_tokens == 8, "pieces that were never announced"


@pytest.mark.parametrize("piece", [ready("a", 2, 5), ready("a", 8, 11), ready("a", 0, 5), ready("a", 4, 4), ready("b", 4, 8)])
def test_a_piece_that_makes_no_sense_costs_the_stream_not_the_worker(piece: ChunkReady) -> None:
    side = decode_side(NEVER)
    side.start(request(), 3, ("p", "q"), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_message(H, ready("ok", 3, 7), 0.0)
    actions = side.on_message(H, piece, 0.0)
    assert "protocol" in only(act.Recovered, actions).cause
    assert only(act.OpenStream, actions).peer == "q"


def test_messages_out_of_order_cost_the_stream() -> None:
    for early in (ready("a", 0, 4), Done(first=FIRST, num_chunks=0)):
        side = decode_side()
        side.start(request(), 0, ("p", "q"), 0.0)
        assert "protocol" in only(act.Recovered, side.on_message(H, early, 0.0)).cause
    side = decode_side()
    transferring(side, ("p", "q"))
    side.on_message(H, Done(first=FIRST, num_chunks=1), 0.0)
    assert "protocol" in only(act.Recovered, side.on_message(H, Done(first=FIRST, num_chunks=1), 0.0)).cause


@pytest.mark.parametrize("finish", [None, FinishReason.STOP])
def test_a_done_with_more_than_one_token_costs_the_stream_as_nobody_has_their_kv(finish: FinishReason | None) -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    many = Output(request_id="r#1", token_ids=(5, 6, 7), finish=finish)
    actions = side.on_message(H, Done(first=many, num_chunks=0), 0.0)
    assert only(act.Recovered, actions).cause == "protocol: Done with 3 tokens, wanted one at most"
    assert none_of(act.FirstToken, actions)


def test_a_piece_over_a_backend_that_was_not_agreed_on_costs_the_stream() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Agreed(backends=("tcp", "grpc")), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    assert none_of(act.Recovered, side.on_message(H, ready("a", 0, 4, "grpc"), 0.0))
    actions = side.on_message(H, ready("b", 4, 8, "pigeon"), 0.0)
    assert only(act.Recovered, actions).cause == "protocol: piece [4, 8) is announced over 'pigeon', wanted one of tcp, grpc"


@pytest.mark.parametrize(("max_tokens", "first"), [(5, Output(request_id="r#1")), (1, FIRST)])
def test_a_done_that_neither_ends_nor_continues_the_request_costs_the_stream(max_tokens: int, first: Output) -> None:
    side = decode_side()
    side.start(request(max_tokens=max_tokens), 0, ("p", "q"), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    actions = side.on_message(H, Done(first=first, num_chunks=0), 0.0)
    assert "protocol" in only(act.Recovered, actions).cause
    assert none_of(act.FirstToken, actions)


def test_every_message_counts_as_progress() -> None:
    side = decode_side()
    side.start(request(), 0, ("p",), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    side.on_message(H, Done(first=FIRST, num_chunks=3), 15.0)
    assert side.tick(24.9) == []
    assert "no piece" in only(act.Recovered, side.tick(25.0)).cause


def test_what_open_waits_for_its_turn_here_is_not_taken_from_the_ten_seconds_of_its_peer() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    assert side.tick(25.0) == [], "thousands were opened before it"
    side.on_message(H, LEFT, 25.0)
    assert stages(side) == ["asked"]
    side.on_message(H, LEFT, 26.0)  # once more: it was another process
    assert side.tick(35.9) == []
    assert only(act.Recovered, side.tick(36.0)).cause == "no answer for 10 s"
    assert side.tick(95.9) == []
    assert only(act.Recovered, side.tick(96.0)).cause == "no answer for 60 s", "nobody says when it left"
