"""The ladder from one prefill worker to the next: another one, a pause, a prefill here, a clean failure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.errors import HandoffLost, Unavailable
from jdisagg.core.requests import FinishReason, Output, Provenance
from jdisagg.handoff import actions as act
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.messages import Accepted, Done, Grant, HandoffId, StreamEnded
from tests.unit.handoff.rig import (
    BPT,
    CONFIG,
    DEAD,
    FIRST,
    H2,
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


def test_the_next_prefill_worker_sends_only_what_is_still_missing() -> None:
    side = decode_side()
    transferring(side, ("p", "q"))
    side.on_arrived(H, "a", 0.0)
    actions = side.on_message(H, DEAD, 1.0)
    opened = only(act.OpenStream, actions)
    assert (opened.peer, opened.handoff, opened.message.held_tokens) == ("q", H2, 4)
    assert act.Send(H2, Grant(credit_bytes=160)) in actions, "it has pages already"


def test_pieces_after_a_gap_are_fetched_again_from_the_next_worker() -> None:
    side = decode_side()
    transferring(side, ("p", "q"))
    side.on_message(H, ready("b", 4, 8), 0.0)
    side.on_arrived(H, "b", 0.0)
    assert only(act.OpenStream, side.on_message(H, DEAD, 1.0)).message.held_tokens == 0


@pytest.mark.covers("X22")
def test_a_stream_that_ends_before_memory_exists_is_noticed() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    assert only(act.OpenStream, side.on_message(H, DEAD, 1.0)).peer == "q"
    assert side.on_reserved("r", 2.0) == [act.Send(H2, Grant(credit_bytes=160))]


def test_the_only_worker_is_asked_once_more_after_a_pause_then_the_prompt_is_computed_here() -> None:
    side = decode_side()
    side.start(request(), 3, ("p", "p"), 0.0)
    lost = side.on_message(H, StreamEnded(reason="unreachable"), 1.0)
    assert only(act.Recovered, lost).rung == "reconnect"
    assert none_of(act.OpenStream, lost)
    assert stages(side) == ["waiting"]
    assert side.tick(1.05) == []
    opened = only(act.OpenStream, side.tick(1.1))
    assert (opened.peer, opened.handoff) == ("p", H2)
    actions = side.on_message(H2, StreamEnded(reason="unreachable"), 1.2)
    local = only(act.ComputeLocally, actions)
    assert (local.request_id, local.held_tokens) == ("r", 3)
    assert local.provenance == Provenance(recoveries=("reconnect", "local_prefill"))
    assert side.is_idle


@pytest.mark.covers("C19", "D13")
def test_without_any_rung_left_the_error_names_request_peer_stage_and_cause() -> None:
    side = decode_side(NEVER)
    transferring(side, ("p", "q"))
    side.start(request(request_id="other"), 0, ("p",), 0.0)
    side.on_message(H, DEAD, 1.0)
    second = HandoffId("r", 3)
    failed = only(act.Fail, side.on_message(second, StreamEnded(reason="heartbeat"), 1.0))
    assert isinstance(failed.error, HandoffLost)
    assert failed.error.message == (
        "request r: hand-off lost at stage opening with q: heartbeat; p tried before; "
        "--local-prefill never forbids computing it here"
    )
    assert list(side.snapshot()["handoffs"]) == ["other"], "it failed alone"


def test_without_peers_the_next_rung_is_taken_at_once() -> None:
    alone = only(act.Recovered, decode_side().start(request(), 0, (), 0.0))
    assert alone == act.Recovered("local_prefill", "r", "", "waiting", "no prefill worker is known to answer")
    side = decode_side(NEVER)
    error = only(act.Fail, side.start(request(), 0, (), 0.0)).error
    assert isinstance(error, Unavailable)
    assert error.message == (
        "request r: no prefill worker is known to answer, and --local-prefill never forbids computing it here; "
        "name one with --prefill, or have one register with this worker's --router"
    )
    assert side.is_idle


def test_a_connection_that_is_lost_is_none_that_drains() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p", "q"), 0.0)
    ended = StreamEnded(reason="unreachable", error=Unavailable("prefill peer p: Hello: UNAVAILABLE"))
    assert only(act.Recovered, side.on_message(H, ended, 0.0)).rung == "other_prefill"
    failed = only(act.Fail, side.on_message(H2, replace(ended, error=Unavailable("prefill peer q: Hello")), 0.0))
    assert failed.error.message == (
        "request r: hand-off lost at stage opening: unreachable: prefill peer q: Hello; p tried before; "
        "--local-prefill never forbids computing it here"
    ), "each peer is named once"


@pytest.mark.parametrize(
    ("peers", "tried"), [(("p",), ""), (("p", "q"), "; p tried before"), (("p", "q", "s"), "; p, q tried before")]
)
def test_whoever_was_tried_before_is_named_too(peers: tuple[str, ...], tried: str) -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, peers, 0.0)
    now_s, failures = 0.0, list[act.Fail]()
    for serial in range(1, 5):
        now_s += 1.0
        actions = [*side.tick(now_s), *side.on_message(HandoffId("r", serial), DEAD, now_s)]
        failures += [action for action in actions if isinstance(action, act.Fail)]
    assert [str(failure.error) for failure in failures] == [
        f"request r: hand-off lost at stage opening with {peers[-1]}: dead{tried}; "
        "--local-prefill never forbids computing it here"
    ]


def test_a_first_token_is_delivered_once_and_later_streams_only_bring_kv() -> None:
    side = decode_side()
    transferring(side, ("p", "q"))
    delivered = only(act.FirstToken, side.on_message(H, Done(first=FIRST, num_chunks=3), 0.0))
    assert delivered.output == Output(request_id="r", token_ids=(42,))
    reopened = only(act.OpenStream, side.on_message(H, DEAD, 1.0)).message.request
    assert reopened.token_ids == request().token_ids
    assert reopened.sampling.ignore_eos, "the second worker's token must not end the request before its KV is sent"
    assert reopened.remaining_tokens > 1
    side.on_message(H2, Accepted(cached_tokens=10), 1.0)
    for key, begin, end in (("x", 0, 4), ("y", 4, 8), ("z", 8, 10)):
        side.on_message(H2, ready(key, begin, end), 1.0)
    other = Output(request_id="r#2", token_ids=(43,))
    assert none_of(act.FirstToken, side.on_message(H2, Done(first=other, num_chunks=3), 1.0))
    side.on_arrived(H2, "x", 1.0)
    side.on_arrived(H2, "y", 1.0)
    complete = only(act.KVComplete, side.on_arrived(H2, "z", 1.0))
    assert complete.provenance.recoveries == ("other_prefill",)
    assert complete.provenance.prefill_worker == "q", "its KV was fetched, not that of the one that sampled the token"
    assert side.is_idle


def test_a_first_token_that_ends_the_request_needs_no_kv() -> None:
    side = DecodeSide(CONFIG, chunk_bytes_per_token=BPT, backend="fake", eos_token_ids=(42,))
    transferring(side)
    last = replace(FIRST, finish=FinishReason.STOP, stop_token_id=42)
    actions = side.on_message(H, Done(first=last, num_chunks=1), 0.0)
    assert only(act.FirstToken, actions).output.finish is FinishReason.STOP
    assert act.CloseStream(H) in actions
    assert act.CancelFetch(H) in actions
    assert side.is_idle


def test_p_may_leave_once_it_owes_nothing_although_pages_are_missing_here() -> None:
    side = decode_side(NEVER)
    side.start(request(), 10, ("p", "q"), 0.0)
    side.on_message(H, Accepted(cached_tokens=10), 0.0)
    side.on_message(H, Done(first=FIRST, num_chunks=0), 0.0)
    assert side.on_message(H, StreamEnded(reason="closed"), 0.0) == []
    assert side.tick(90.0) == [], "no stall either: it waits for pages, not for P"
    actions = side.on_reserved("r", 90.0)
    assert none_of(act.Send, actions)
    assert only(act.KVComplete, actions).provenance.transferred_tokens == 0
    side.start(request(), 10, ("p", "q"), 0.0)
    again = HandoffId("r", 2)
    assert only(act.OpenStream, side.on_message(again, StreamEnded(reason="closed"), 0.0)).peer == "q", "no token yet"


def test_pages_are_reported_once() -> None:
    side = decode_side()
    transferring(side)
    assert side.on_reserved("r", 0.0) == [], "neither credit nor fetches twice"


def test_the_same_request_twice_is_our_bug() -> None:
    side = decode_side()
    side.start(request(), 0, ("p",), 0.0)
    with pytest.raises(AssertionError, match="live hand-off"):
        side.start(request(), 0, ("p",), 0.0)
