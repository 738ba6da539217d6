"""What the last output of a request says about where its KV came from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.requests import FinishReason, Provenance
from jdisagg.handoff import actions as act
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.messages import Accepted, Done, HandoffId, StreamEnded
from tests.unit.handoff.rig import FIRST, NEVER, decode_side, only, ready, request

P = Provenance(prefill_worker="pid 1 @ p", prefilled_tokens=7, borrowed_tokens=3, borrowed_bytes=30)
Q = Provenance(prefill_worker="pid 2 @ q", prefilled_tokens=4, borrowed_tokens=2, borrowed_bytes=20)


def complete(side: DecodeSide, handoff: HandoffId, begin: int, said: Provenance | None) -> Provenance:
    """P brings KV of [begin, 10) in pieces of 4 at most; returns what D says at the end."""
    side.on_message(handoff, Accepted(cached_tokens=6), 0.0)
    side.on_reserved("r", 0.0)
    for start in range(begin, 10, 4):
        side.on_message(handoff, ready(f"k{start}", start, min(start + 4, 10)), 0.0)
    last = side.on_message(handoff, Done(first=replace(FIRST, provenance=said), num_chunks=3), 0.0)
    for start in range(begin, 10, 4):
        last = side.on_arrived(handoff, f"k{start}", 0.0)
    return only(act.KVComplete, last).provenance


def test_the_worker_says_of_itself_who_it_is_and_what_it_computed() -> None:
    side = decode_side(NEVER)
    side.start(request(), 2, ("p",), 0.0)
    got = complete(side, HandoffId("r", 1), 2, P)
    assert got == replace(P, transferred_tokens=8, transferred_bytes=80)


def test_one_that_says_nothing_is_named_by_its_address_and_what_it_had_cached() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p:1",), 0.0)
    got = complete(side, HandoffId("r", 1), 0, None)
    assert got == Provenance(prefill_worker="p:1", prefilled_tokens=4, transferred_tokens=10, transferred_bytes=100)


@pytest.mark.parametrize("second", [Q, None])
def test_of_two_workers_the_one_that_brought_the_last_of_it_is_named(second: Provenance | None) -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p", "q"), 0.0)
    first = HandoffId("r", 1)
    side.on_message(first, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    side.on_message(first, ready("a", 0, 4), 0.0)
    side.on_message(first, Done(first=replace(FIRST, provenance=P), num_chunks=3), 0.0)
    side.on_arrived(first, "a", 0.0)
    side.on_message(first, StreamEnded(reason="dead"), 0.0)
    got = complete(side, HandoffId("r", 2), 4, second)
    named = ("pid 2 @ q", 4) if second is not None else ("q", 4)
    assert (got.prefill_worker, got.prefilled_tokens) == named
    assert (got.transferred_tokens, got.transferred_bytes) == (10, 100), "of both"
    assert (got.borrowed_tokens, got.borrowed_bytes) == ((5, 50) if second is not None else (3, 30)), "by both"
    assert got.recoveries == ("other_prefill",)


def test_what_a_dead_worker_brought_is_told_although_the_rest_is_computed_here() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "p"), 0.0)
    first = HandoffId("r", 1)
    side.on_message(first, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    side.on_message(first, ready("a", 0, 4), 0.0)
    side.on_arrived(first, "a", 0.0)
    side.on_message(first, StreamEnded(reason="dead"), 0.0)
    side.tick(1.0)
    local = only(act.ComputeLocally, side.on_message(HandoffId("r", 2), StreamEnded(reason="unreachable"), 1.0))
    assert local.held_tokens == 4
    assert local.provenance == Provenance(
        prefill_worker="p", transferred_tokens=4, transferred_bytes=40, recoveries=("reconnect", "local_prefill")
    )


@pytest.mark.parametrize("said", [P, None])
def test_a_request_that_ends_with_its_first_token_says_what_p_said_and_which_rungs_were_taken(said: Provenance | None) -> None:
    ended = replace(FIRST, finish=FinishReason.LENGTH, provenance=said)
    for is_lost, told in ((False, said), (True, replace(said or Provenance(), recoveries=("other_prefill",)))):
        side = decode_side(NEVER)
        side.start(request(max_tokens=1), 0, ("p", "q"), 0.0)
        if is_lost:
            side.on_message(HandoffId("r", 1), StreamEnded(reason="dead"), 0.0)
        handoff = HandoffId("r", 1 + is_lost)
        side.on_message(handoff, Accepted(cached_tokens=0), 0.0)
        done = side.on_message(handoff, Done(first=ended, num_chunks=0), 0.0)
        assert only(act.FirstToken, done).output.provenance == told
