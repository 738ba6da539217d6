"""Fetches that fail: tried again, published again, over another backend, and at last from another prefill worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.errors import DeadlineExceeded
from jdisagg.handoff import actions as act
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.messages import Accepted, Agreed, Done, Grant, StreamEnded, Want
from tests.unit.handoff.rig import BPT, CONFIG, FIRST, H2, NEVER, H, decode_side, none_of, only, ready, request, transferring

SPANS = {"a": (0, 4), "b": (4, 8), "c": (8, 10)}


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


def accepted_over_two_backends() -> DecodeSide:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Agreed(backends=("fake", "spare")), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    return side


@pytest.mark.covers("C08")
def test_a_backend_that_fails_twice_is_left_for_the_next_one_and_only_what_is_missing_is_sent_again() -> None:
    side = accepted_over_two_backends()
    side.on_reserved("r", 0.0)
    for key, span in SPANS.items():
        side.on_message(H, ready(key, *span), 0.0)
    assert any(isinstance(a, act.Import) for a in side.on_arrived(H, "a", 1.0))
    side.on_failed(H, "b", "connection", 2.0)
    changed = side.on_failed(H, "b", "connection", 3.0)
    recovered = only(act.Recovered, changed)
    assert (recovered.rung, recovered.peer, recovered.unreached) == ("other_backend", "p", "")
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


def test_a_backend_whose_port_is_shut_is_left_at_once_and_remembered() -> None:
    side = accepted_over_two_backends()
    side.on_reserved("r", 0.0)
    side.on_message(H, ready("a", 0, 4), 0.0)
    changed = side.on_failed(H, "a", "unreachable", 2.0)
    recovered = only(act.Recovered, changed)
    assert (recovered.rung, recovered.peer, recovered.unreached) == ("other_backend", "p", "fake")
    assert recovered.cause == "fetch of [0, 4) over fake: unreachable; going on over spare"
    side.on_message(H, ready("a2", 0, 4, "spare"), 2.0)
    assert only(act.Recovered, side.on_failed(H, "a2", "unreachable", 2.0)).rung == "refetch", "there is no other one"
    assert only(act.Recovered, side.on_failed(H, "a2", "unreachable", 2.1)).unreached == ""


def test_a_late_piece_over_a_broken_backend_is_asked_for_again_and_the_last_backend_gets_its_three_tries() -> None:
    side = accepted_over_two_backends()
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


def test_a_late_piece_over_a_backend_that_brings_nothing_is_asked_for_again_over_the_one_that_does() -> None:
    side = accepted_over_two_backends()
    side.on_reserved("r", 0.0)
    side.on_message(H, ready("a", *SPANS["a"]), 0.0)
    side.on_failed(H, "a", "stalled", 2.0)
    assert only(act.Recovered, side.on_failed(H, "a", "stalled", 4.0)).rung == "other_backend"
    side.on_message(H, ready("b", *SPANS["b"]), 4.0)  # published before P heard of the change
    late = side.on_failed(H, "b", "stalled", 6.0)
    assert only(act.Recovered, late).rung == "refetch"
    assert Want(begin=4, end=8, reason="stalled") in [a.message for a in late if isinstance(a, act.Send)]


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


def test_fetches_never_outlive_the_deadline() -> None:
    side = decode_side()
    side.start(request(deadline_s=3.0), 0, ("p",), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    assert only(act.Fetch, side.on_message(H, ready("a", 0, 4), 1.0)).deadline_s == 3.0


def test_a_piece_announced_twice_is_fetched_once() -> None:
    side = decode_side()
    piece = transferring(side)
    assert side.on_message(H, piece, 0.0) == []


def fetching_until(deadline_s: float) -> DecodeSide:
    """Two pieces of a request that has so long are being fetched."""
    side = decode_side(NEVER)
    side.start(request(8, deadline_s=deadline_s), 0, ("p", "q"), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    for key in "ab":
        side.on_message(H, ready(key, *SPANS[key]), 0.0)
    return side


@pytest.mark.parametrize(
    ("reason", "now_s"), [("timeout", 1.999), ("slow", 1.999), ("timeout", 2.0), ("unknown_key", 2.0)]
)  # 1.999: the clock was looked at before the inbox was
def test_a_fetch_that_ends_with_its_request_s_time_is_no_failure_and_not_tried_again(reason: str, now_s: float) -> None:
    side = fetching_until(2.0)
    assert not side.is_failure(H, "a", reason, now_s)
    ended = side.on_failed(H, "a", reason, now_s)
    assert isinstance(only(act.Fail, ended).error, DeadlineExceeded)
    assert act.CancelFetch(H) in ended
    assert none_of(act.Recovered, ended)
    assert side.is_idle
    assert not side.is_failure(H, "b", reason, now_s), "nobody waits for it any more"
    assert side.on_failed(H, "b", reason, now_s) == []


@pytest.mark.parametrize("reason", ["timeout", "slow", "unknown_key", "checksum"])
def test_a_fetch_that_fails_while_its_request_has_time_is_a_failure_and_tried_again(reason: str) -> None:
    side = fetching_until(20.0)
    assert side.is_failure(H, "a", reason, 19.999)
    assert only(act.Recovered, side.on_failed(H, "a", reason, 19.999)).rung == "refetch"


def test_what_comes_late_of_an_earlier_fetch_says_nothing_of_the_time_that_the_request_has() -> None:
    side = fetching_until(10.0)
    side.tick(6.01)  # the first fetch is taken for lost; the second one has no more time than the request
    assert side.is_failure(H, "a", "timeout", 7.0)
    assert none_of(act.Fail, side.on_failed(H, "a", "timeout", 7.0))


@pytest.mark.parametrize("reason", ["checksum", "truncated", "stalled", "connection", "unreachable", "device"])
def test_what_breaks_on_its_way_is_a_failure_of_the_transfer_though_nobody_needs_it_any_more(reason: str) -> None:
    side = fetching_until(2.0)
    assert side.is_failure(H, "a", reason, 3.0)
    assert isinstance(only(act.Fail, side.on_failed(H, "a", reason, 3.0)).error, DeadlineExceeded)
    assert side.is_failure(H, "b", reason, 3.0)


def test_a_fetch_that_lost_its_time_to_a_standstill_of_this_process_is_tried_again() -> None:
    """It had five seconds of the request's ten, and would have as long as the request by now."""
    side = fetching_until(10.0)
    for now_s in (1.0, 9.0):
        side.look(now_s)
    assert side.is_failure(H, "a", "timeout", 9.0)
    assert only(act.Recovered, side.on_failed(H, "a", "timeout", 9.0)).rung == "refetch"
