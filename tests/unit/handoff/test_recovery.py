"""The ladder, rung by rung: fetch again, another prefill worker, a pause, a prefill here, a clean failure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.errors import (
    DeadlineExceeded,
    HandoffLost,
    InvalidRequest,
    ModelNotFound,
    NumericalError,
    Overloaded,
    RequestError,
    Unavailable,
)
from jdisagg.core.requests import FinishReason, Output, Provenance
from jdisagg.handoff import actions as act
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.messages import Accepted, Agreed, ChunkReady, Done, Grant, HandoffId, Refused, Started, StreamEnded, Want
from tests.unit.handoff.rig import BPT, CONFIG, FIRST, NEVER, H, decode_side, none_of, only, ready, request

H2 = HandoffId("r", 2)
DEAD = StreamEnded(reason="dead")
SPANS = {"a": (0, 4), "b": (4, 8), "c": (8, 10)}


def transferring(side: DecodeSide, peers: tuple[str, ...] = ("p",)) -> ChunkReady:
    """One piece, [0, 4), is being fetched."""
    side.start(request(), 0, peers, 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    piece = ready("a", 0, 4)
    side.on_message(H, piece, 0.0)
    return piece


@pytest.mark.covers("C08")
def test_a_failed_fetch_is_tried_again_then_published_again_then_given_up() -> None:
    side = decode_side(NEVER)
    piece = transferring(side, ("p", "q"))
    again = side.on_failed(H, "a", "checksum", 1.0)
    assert only(act.Fetch, again).ready == piece
    assert only(act.Recovered, again).rung == "refetch"
    fresh = side.on_failed(H, "a", "checksum", 2.0)
    assert [a.message for a in fresh if isinstance(a, act.Send)] == [
        Grant(credit_bytes=200),
        Want(begin=0, end=4, reason="checksum"),
    ], "the abandoned piece's bytes are granted anew"
    assert side.on_arrived(H, "a", 2.0) == [], "the abandoned key arrives too late"
    assert only(act.Fetch, side.on_message(H, ready("b", 0, 4), 2.0)).ready.key == "b"
    lost = side.on_failed(H, "b", "timeout", 3.0)
    assert lost[:2] == [act.CancelFetch(H), act.CloseStream(H)]
    recovered = only(act.Recovered, lost)
    assert (recovered.rung, recovered.peer, recovered.stage) == ("other_prefill", "p", "transferring")
    assert "timeout" in recovered.cause
    assert only(act.OpenStream, lost).peer == "q"


@pytest.mark.covers("C08")
def test_a_backend_that_fails_twice_is_left_for_the_next_one_and_only_what_is_missing_is_sent_again() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Agreed(backends=("fake", "spare")), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    for key, span in SPANS.items():
        side.on_message(H, ready(key, *span), 0.0)
    assert any(isinstance(a, act.Import) for a in side.on_arrived(H, "a", 1.0))
    side.on_failed(H, "b", "connection", 2.0)
    changed = side.on_failed(H, "b", "connection", 3.0)
    recovered = only(act.Recovered, changed)
    assert (recovered.rung, recovered.peer) == ("other_backend", "p")
    assert recovered.cause == "fetch of [4, 8) over fake: connection; going on over spare"
    assert act.CancelFetch(H) in changed, "what is under way over the broken one is not waited for"
    assert none_of(act.CloseStream, changed), "the same prefill worker goes on: nothing is computed again"
    wants = [a.message for a in changed if isinstance(a, act.Send) and isinstance(a.message, Want)]
    assert wants == [Want(begin=b, end=e, reason="connection", backend="spare") for b, e in (SPANS["b"], SPANS["c"])]
    assert side.on_arrived(H, "c", 3.0) == [], "it came too late over the broken one"
    for key, span in (("b2", SPANS["b"]), ("c2", SPANS["c"])):
        assert only(act.Fetch, side.on_message(H, ready(key, *span, "spare"), 4.0)).ready.backend == "spare"
        side.on_arrived(H, key, 5.0)
    done = side.on_message(H, Done(first=FIRST, num_chunks=5), 6.0)
    assert only(act.KVComplete, done).provenance.recoveries == ("refetch", "other_backend")


def test_a_late_piece_over_a_broken_backend_is_asked_for_again_and_the_last_backend_gets_its_three_tries() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Agreed(backends=("fake", "spare")), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    side.on_message(H, ready("a", *SPANS["a"]), 0.0)
    side.on_failed(H, "a", "checksum", 1.0)
    side.on_failed(H, "a", "checksum", 1.0)
    side.on_message(H, ready("b", *SPANS["b"]), 1.0)  # published before P heard of the change
    late = side.on_failed(H, "b", "checksum", 1.0)
    assert only(act.Recovered, late).rung == "refetch"
    assert Want(begin=4, end=8, reason="checksum") in [a.message for a in late if isinstance(a, act.Send)]
    side.on_message(H, ready("a2", *SPANS["a"], "spare"), 2.0)
    assert only(act.Fetch, side.on_failed(H, "a2", "checksum", 2.0)).ready.backend == "spare"
    assert none_of(act.Fetch, side.on_failed(H, "a2", "checksum", 2.0)), "published again: there is no other backend"
    side.on_message(H, ready("a3", *SPANS["a"], "spare"), 3.0)
    lost = side.on_failed(H, "a3", "checksum", 3.0)
    assert only(act.Recovered, lost).rung == "other_prefill"
    assert only(act.OpenStream, lost).message.backend == "fake", "another worker may well do it"


@pytest.mark.covers("X15")
def test_what_is_lost_of_one_kv_group_costs_the_other_groups_nothing() -> None:
    """Two groups: a piece of the second fails; what arrived stays, and the next peer is asked from where both have all."""
    side = DecodeSide(CONFIG, chunk_bytes_per_token=BPT, backend="fake", num_groups=2)
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    pieces = {(key, g): replace(ready(f"{key}{g}", *span), group=g) for key, span in SPANS.items() for g in (0, 1)}
    for piece in pieces.values():
        side.on_message(H, piece, 0.0)
    for arrived in ("a0", "b0", "c0", "a1"):
        assert any(isinstance(a, act.Import) for a in side.on_arrived(H, arrived, 1.0))
    side.on_failed(H, "b1", "checksum", 2.0)
    wanted = [a.message for a in side.on_failed(H, "b1", "checksum", 2.0) if isinstance(a, act.Send)]
    assert Want(begin=4, end=8, reason="checksum", group=1) in wanted
    assert side.on_message(H, replace(ready("b2", 4, 8), group=1), 2.0) != [], "it may be announced again"
    again = only(act.OpenStream, side.on_message(H, StreamEnded(reason="dead"), 3.0)).message
    assert again.held_tokens == 4
    side.on_message(H2, Accepted(cached_tokens=0), 3.0)
    foreign = side.on_message(H2, replace(ready("x", 4, 8), group=2), 3.0)
    assert "KV group 2; this cache has 2" in only(act.Recovered, foreign).cause


def test_an_unknown_key_is_published_again_at_once() -> None:
    side = decode_side()
    transferring(side)
    assert only(act.Fetch, side.on_failed(H, "a", "connection", 1.0)).ready.key == "a"
    other = decode_side()
    transferring(other)
    actions = other.on_failed(H, "a", "unknown_key", 1.0)
    assert none_of(act.Fetch, actions)
    assert any(isinstance(a, act.Send) and isinstance(a.message, Want) for a in actions)


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


def test_a_pause_for_another_worker_that_was_full_is_no_reconnection_to_the_one_that_was_lost() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Refused(error=Overloaded("full")), 1.0)
    lost = only(act.Recovered, side.on_message(H2, DEAD, 1.0))
    assert (lost.rung, lost.peer) == ("other_prefill", "q")
    assert only(act.OpenStream, side.tick(2.0)).peer == "p"


def test_the_only_worker_is_asked_once_more_after_a_pause_then_the_prompt_is_computed_here() -> None:
    side = decode_side()
    side.start(request(), 3, ("p", "p"), 0.0)
    lost = side.on_message(H, StreamEnded(reason="unreachable"), 1.0)
    assert only(act.Recovered, lost).rung == "reconnect"
    assert none_of(act.OpenStream, lost)
    assert side.counts()["waiting"] == 1
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
    assert side.counts()["waiting"] == 1
    assert side.tick(0.09) == []
    third = HandoffId("r", 3)
    assert only(act.OpenStream, side.tick(0.1)).peer == "p"
    assert side.on_message(third, DRAINING, 0.1)[-1:] != []
    side.on_message(HandoffId("r", 4), Accepted(cached_tokens=0), 0.2)
    assert side.counts()["accepted"] == 1, "another one in its place"


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


@pytest.mark.parametrize("error", [NumericalError("NaN"), DeadlineExceeded("late")])
@pytest.mark.covers("P02")
def test_an_error_that_would_come_back_everywhere_ends_the_request_with_it(error: RequestError) -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    actions = side.on_message(H, Refused(error=error), 0.0)
    assert only(act.Fail, actions).error is error
    assert act.CloseStream(H) in actions
    assert side.is_idle


@pytest.mark.parametrize("answer", [Refused(error=InvalidRequest("its pool is 8 tokens")), "Done"])
def test_a_stream_that_has_outgrown_every_prefill_worker_is_lost_and_not_its_client_s_fault(answer: Refused | str) -> None:
    side = decode_side(NEVER)
    side.start(replace(request(), generated_token_ids=(7, 8)), 0, ("p",), 0.0)
    error = InvalidRequest("its pool is 8 tokens")
    message = answer if isinstance(answer, Refused) else Done(first=Output(request_id="r", error=error), num_chunks=0)
    if message is not answer:
        side.on_message(H, Accepted(cached_tokens=0), 0.0)
    failed = only(act.Fail, side.on_message(H, message, 1.0)).error
    assert isinstance(failed, HandoffLost)
    assert "12 tokens, are more than any prefill worker takes (its pool is 8 tokens)" in failed.message
    assert "--max-model-len" in failed.message


@pytest.mark.parametrize("error", [InvalidRequest("its context is 8 tokens"), ModelNotFound("it serves another one")])
@pytest.mark.covers("P02")
def test_a_worker_for_which_the_request_is_wrong_is_like_one_that_failed(error: RequestError) -> None:
    side = decode_side()
    side.start(request(), 0, ("short", "q"), 0.0)
    actions = side.on_message(H, Refused(error=error), 0.0)
    noted = act.Recovered("other_prefill", "r", "short", "opening", f"refused: {error}")
    assert only(act.Recovered, actions) == noted
    assert (only(act.OpenStream, actions).peer, act.CloseStream(H) in actions) == ("q", True)
    local = side.on_message(H2, StreamEnded(reason="unreachable", error=error), 0.0)
    assert only(act.ComputeLocally, local).provenance.recoveries == ("other_prefill", "local_prefill")
    assert side.is_idle


@pytest.mark.parametrize("peers", [("p",), ("p", "q")])
def test_a_request_that_is_wrong_for_everybody_ends_with_what_the_last_one_says(peers: tuple[str, ...]) -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, peers, 0.0)
    errors = [InvalidRequest(f"the context of {peer} is short") for peer in peers]
    actions: list[act.DecodeAction] = []
    for serial, error in enumerate(errors, 1):
        assert none_of(act.Fail, actions)
        actions = side.on_message(HandoffId("r", serial), Refused(error=error), 0.0)
    assert only(act.Fail, actions).error is errors[-1], "at once: nobody is asked a second time"
    assert side.is_idle


@pytest.mark.parametrize("other", [InvalidRequest("short"), Unavailable("no backend in common", field="kv_transfer_backend")])
def test_a_worker_whose_settings_forbid_it_is_not_asked_again_and_does_not_blame_the_request(other: RequestError) -> None:
    side, unlike = decode_side(NEVER), Unavailable("no backend in common", field="kv_transfer_backend")
    side.start(request(), 0, ("p", "q"), 0.0)
    assert only(act.OpenStream, side.on_message(H, Refused(error=unlike), 0.0)).peer == "q"
    failed = only(act.Fail, side.on_message(H2, Refused(error=other), 0.0)).error
    assert isinstance(failed, Unavailable), "at once, as what the operator can mend"
    assert side.is_idle


@pytest.mark.parametrize(
    "answers", [(Refused(error=InvalidRequest("short")), DEAD), (DEAD, Refused(error=InvalidRequest("short")))]
)
def test_a_request_is_not_called_wrong_while_one_who_was_lost_might_have_served_it(
    answers: tuple[Refused | StreamEnded, ...],
) -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, answers[0], 0.0)
    assert isinstance(only(act.Fail, side.on_message(H2, answers[1], 0.0)).error, HandoffLost)


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
    assert side.counts()["waiting"] == 1


def test_one_for_which_the_request_is_wrong_is_not_asked_again_while_the_other_is_full() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("short", "q"), 0.0)
    side.on_message(H, Refused(error=InvalidRequest("short")), 0.0)
    side.on_message(H2, Refused(error=Overloaded("full")), 0.0)
    assert only(act.OpenStream, side.tick(1.0)).peer == "q"


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


def test_fetches_never_outlive_the_deadline() -> None:
    side = decode_side()
    side.start(request(deadline_s=3.0), 0, ("p",), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    assert only(act.Fetch, side.on_message(H, ready("a", 0, 4), 1.0)).deadline_s == 3.0


@pytest.mark.covers("X13")
def test_silence_is_noticed_at_each_stage() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
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


def test_a_full_worker_is_waited_for_when_the_other_one_is_lost() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Refused(error=Overloaded("full")), 0.0)
    assert none_of(act.Fail, side.on_message(H2, DEAD, 0.0))
    assert only(act.OpenStream, side.tick(0.1)).peer == "p"
    assert isinstance(only(act.Fail, side.on_message(HandoffId("r", 3), DEAD, 0.2)).error, HandoffLost)


def test_pages_are_reported_once() -> None:
    side = decode_side()
    transferring(side)
    assert side.on_reserved("r", 0.0) == [], "neither credit nor fetches twice"


def test_every_message_counts_as_progress() -> None:
    side = decode_side()
    side.start(request(), 0, ("p",), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    side.on_message(H, Done(first=FIRST, num_chunks=3), 15.0)
    assert side.tick(24.9) == []
    assert "no piece" in only(act.Recovered, side.tick(25.0)).cause


def test_a_piece_announced_twice_is_fetched_once() -> None:
    side = decode_side()
    piece = transferring(side)
    assert side.on_message(H, piece, 0.0) == []


def test_the_same_request_twice_is_our_bug() -> None:
    side = decode_side()
    side.start(request(), 0, ("p",), 0.0)
    with pytest.raises(AssertionError, match="live hand-off"):
        side.start(request(), 0, ("p",), 0.0)


def test_all_whose_pause_is_over_at_once_go_on_at_once() -> None:
    side = decode_side()
    for serial, request_id in enumerate("rs", 1):
        side.start(request(request_id=request_id), 0, ("p",), 0.0)
        side.on_message(HandoffId(request_id, serial), Refused(error=Overloaded("full")), 0.0)
    opened = [action.handoff.request_id for action in side.tick(1.0) if isinstance(action, act.OpenStream)]
    assert opened == ["r", "s"]
