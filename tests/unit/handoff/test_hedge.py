"""A P that falls quiet is doubted: another one is asked, and whoever acts first has the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from jdisagg.core.errors import NumericalError, Overloaded
from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import (
    Accepted,
    Awake,
    Done,
    Grant,
    HandoffId,
    PrefillToDecode,
    Quiet,
    Refused,
    Started,
    StreamEnded,
)
from jdisagg.handoff.recovery import MOST_HEDGES
from tests.unit.handoff.hedge_rig import H3, QUIET, SILENCE, closed, hedged, outcome, say, transferring
from tests.unit.handoff.rig import CONFIG, FIRST, H2, LEFT, H, decode_side, none_of, only, ready, request


def test_while_a_peer_is_quiet_the_next_one_is_asked_for_what_is_missing() -> None:
    side = transferring()
    asked = say(side, H, QUIET)
    opened = only(act.OpenStream, asked)
    assert (opened.handoff, opened.peer, opened.message.held_tokens) == (H2, "q", 4)
    assert none_of(act.CancelFetch, asked), "what is on its way may arrive"
    assert act.Send(H2, Grant(credit_bytes=160)) in asked, "it has pages"
    assert not closed(asked), "the quiet one may come back"
    assert none_of(act.Recovered, asked), "nothing is lost yet"
    shown = side.snapshot()["handoffs"]["r"]
    assert (shown["peer"], shown["doubted_peer"], shown["stage"]) == ("q", "p", "opening")


def test_a_moment_of_quiet_does_not_send_all_of_a_peer_s_prompts_to_the_next_one() -> None:
    side = decode_side()
    number = MOST_HEDGES + 3
    handoffs = [HandoffId(f"r{index}", index + 1) for index in range(number)]
    for handoff in handoffs:
        side.start(request(request_id=handoff.request_id), 0, ("p", "q"), 0.0)
    opened = [action for handoff in handoffs for action in say(side, handoff, QUIET) if isinstance(action, act.OpenStream)]
    assert len(opened) == MOST_HEDGES
    assert side.tick(1.1) == []
    hedge = opened[0].handoff
    assert outcome_of(say(side, hedge, Accepted(cached_tokens=0), Started())) == "moved"
    more = [action.peer for action in side.tick(1.2) if isinstance(action, act.OpenStream)]
    assert more == ["q"], "the next one has its turn"
    assert only(act.CloseStream, say(side, handoffs[1], Awake())).handoff == opened[1].handoff
    say(side, handoffs[-2], Awake())
    assert none_of(act.OpenStream, side.tick(1.3)[1:])
    assert none_of(act.OpenStream, side.tick(1.4)), "nobody is quiet any more who is not doubted"
    for handoff in handoffs:
        side.release(handoff.request_id)
    assert side.is_idle


def test_prompts_that_nobody_else_can_be_asked_for_take_no_turn_of_those_that_wait_for_one() -> None:
    side = decode_side()
    alone = [HandoffId(f"alone{index}", index + 1) for index in range(MOST_HEDGES)]
    others = [HandoffId(f"r{index}", MOST_HEDGES + index + 1) for index in range(MOST_HEDGES + 1)]
    for handoff in (*alone, *others):
        peers = ("p",) if handoff in alone else ("p", "q")
        side.start(request(request_id=handoff.request_id), 0, peers, 0.0)
    asked = [only(act.OpenStream, say(side, handoff, QUIET)) for handoff in others[:-1]]
    assert not any(say(side, handoff, QUIET) for handoff in (*alone, others[-1]))
    assert outcome_of(say(side, asked[0].handoff, Accepted(cached_tokens=0), Started())) == "moved"
    assert only(act.OpenStream, side.tick(1.2)).handoff.request_id == others[-1].request_id


def outcome_of(actions: Sequence[act.DecodeAction]) -> str:
    return only(act.Hedged, actions).outcome


@pytest.mark.covers("C08")
def test_the_other_one_has_the_request_once_it_has_something_to_show() -> None:
    side = hedged()
    assert none_of(act.CloseStream, say(side, H2, Accepted(cached_tokens=0))), "it stands in a queue there"
    assert none_of(act.CloseStream, say(side, H2, Started())), "the quiet one is further"
    moved = say(side, H2, ready("x", 4, 8))
    assert closed(moved) == [H]
    assert outcome(moved) == ("moved", "p", "q")
    recovered = only(act.Recovered, moved)
    assert (recovered.rung, recovered.peer, recovered.stage) == ("other_prefill", "p", "transferring")
    assert recovered.cause == "nothing heard for 0.6 s; q was asked meanwhile"
    assert say(side, H, Awake()) == [], "too late"
    assert say(side, H, ready("c", 8, 10)) == []


@pytest.mark.covers("C08")
@pytest.mark.parametrize("said", [(), (Accepted(cached_tokens=0), Started())])
def test_of_two_that_have_nothing_to_show_the_first_to_compute_has_the_request(said: tuple[PrefillToDecode, ...]) -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    say(side, H, *said, QUIET)
    assert outcome(say(side, H2, Accepted(cached_tokens=0), Started())) == ("moved", "p", "q")


def test_who_was_only_quiet_is_asked_again_when_the_other_fails_and_who_died_is_not() -> None:
    side = hedged()
    say(side, H2, Accepted(cached_tokens=0), Started(), ready("x", 4, 8))
    lost = say(side, H2, StreamEnded(reason="dead"))
    assert only(act.Recovered, lost).rung == "other_prefill"
    assert only(act.OpenStream, side.tick(2.0)).peer == "p"
    side = hedged()
    say(side, H, SILENCE)
    assert only(act.ComputeLocally, say(side, H2, StreamEnded(reason="dead"))).held_tokens == 4


def test_a_hedge_that_is_quiet_itself_is_doubted_when_its_turn_comes() -> None:
    side = hedged("p", "q", "s")
    assert say(side, H2, QUIET) == [], "two are asked already"
    assert say(side, H, QUIET) == [], "which is known"
    assert only(act.OpenStream, say(side, H, SILENCE, now_s=50.0)).peer == "s"
    assert side.snapshot()["handoffs"]["r"]["doubted_peer"] == "q"
    say(side, H3, LEFT, now_s=50.0)
    assert side.tick(59.0) == [], "the third has its time to answer"
    say(side, H3, Accepted(cached_tokens=0), now_s=59.0)
    moved = say(side, H3, ready("x", 4, 8), now_s=59.0)
    assert only(act.Recovered, moved).cause == "nothing heard for 0.6 s; s was asked meanwhile"


def test_of_a_quiet_hedge_its_own_silence_is_told() -> None:
    side = hedged("p", "q", "s")
    say(side, H2, Quiet(0.7))
    say(side, H, SILENCE, now_s=50.0)
    say(side, H3, Accepted(cached_tokens=0), now_s=59.0)
    moved = say(side, H3, ready("x", 4, 8), now_s=59.0)
    assert only(act.Recovered, moved).cause == "nothing heard for 0.7 s; s was asked meanwhile"


def test_who_waited_to_be_asked_elsewhere_is_told_of_with_its_own_silence_and_has_as_long_to_be_answered() -> None:
    side = decode_side()
    handoffs = [HandoffId(f"r{index}", index + 1) for index in range(MOST_HEDGES + 2)]
    for handoff in handoffs:
        side.start(request(request_id=handoff.request_id), 0, ("p", "q"), 0.0)
    for handoff in handoffs:
        for hedge in say(side, handoff, Quiet(0.5 + handoff.serial)):
            if isinstance(hedge, act.OpenStream):
                say(side, hedge.handoff, LEFT)
    for handoff in handoffs[:2]:
        say(side, handoff, Awake())
    opened = {action.handoff.request_id: action.handoff for action in side.tick(1.2) if isinstance(action, act.OpenStream)}
    assert list(opened) == [handoff.request_id for handoff in handoffs[-2:]], "both at once"
    over = {action.request_id for action in side.tick(11.1) if isinstance(action, act.Hedged)}
    assert over == {handoff.request_id for handoff in handoffs[2:-2]}, "those have been asked for ten seconds"
    moved = say(side, opened[handoffs[-1].request_id], Accepted(cached_tokens=0), Started())
    assert only(act.Recovered, moved).cause == f"nothing heard for {0.5 + len(handoffs)} s; q was asked meanwhile"


def test_a_quiet_one_gets_no_credit_for_what_still_arrives() -> None:
    side = hedged(config=replace(CONFIG, transfer_buffer_bytes=80))
    assert none_of(act.Send, side.on_arrived(H, "b", 1.0)[2:]), "beside what says that the piece is here"


def test_a_hedge_that_is_heard_needs_no_third() -> None:
    side = hedged("p", "q", "s")
    assert outcome(say(side, H, StreamEnded(reason="dead", error=Overloaded("lost"))))[0] == "moved"
    assert side.snapshot()["handoffs"]["r"]["doubted_peer"] == ""
    assert side.tick(2.0) == []


def test_its_first_token_is_a_sign_too_and_its_error_is_none() -> None:
    one = hedged()
    say(one, H2, Accepted(cached_tokens=0))
    assert outcome(say(one, H2, Done(first=FIRST, num_chunks=2)))[0] == "moved"
    other = hedged()
    say(other, H2, Accepted(cached_tokens=0))
    failed = Done(first=type(FIRST)(request_id="r#2", error=Overloaded("full")), num_chunks=0)
    assert outcome(say(other, H2, failed)) == ("refused", "p", "q")


@pytest.mark.covers("C08")
def test_a_quiet_one_that_dies_leaves_the_request_to_the_other() -> None:
    side = hedged()
    moved = say(side, H, SILENCE)
    assert outcome(moved) == ("moved", "p", "q")
    assert only(act.Recovered, moved).cause == "heartbeat; q was asked meanwhile"
    told = say(hedged(), H, StreamEnded(reason="dead", error=Overloaded("it stops")))
    assert only(act.Recovered, told).cause == "dead: it stops; q was asked meanwhile"
    assert none_of(act.OpenStream, moved), "it was asked already"
    say(side, H2, Accepted(cached_tokens=0), Started(), ready("x", 4, 8), ready("y", 8, 10), Done(first=FIRST, num_chunks=2))
    side.on_arrived(H2, "x", 2.0)
    assert only(act.KVComplete, side.on_arrived(H2, "y", 2.0)).provenance.recoveries == ("other_prefill",)


def test_when_both_are_lost_what_arrived_is_kept_and_the_rest_computed_here() -> None:
    side = hedged()
    say(side, H2, StreamEnded(reason="dead"))
    lost = say(side, H, SILENCE)
    local = only(act.ComputeLocally, lost)
    assert local.held_tokens == 4
    assert local.provenance.recoveries == ("local_prefill",)
    assert side.is_idle


def test_the_only_peer_and_one_that_owes_nothing_are_not_hedged() -> None:
    assert hedged("p").snapshot()["handoffs"]["r"]["doubted_peer"] == ""
    side = decode_side()
    side.start(request(), 10, ("p", "q"), 0.0)  # all is here already, only pages are missing
    say(side, H, Accepted(cached_tokens=0), Done(first=FIRST, num_chunks=0))
    assert say(side, H, QUIET) == []


def test_a_first_token_is_delivered_once_whoever_computes_the_rest() -> None:
    side = transferring()
    assert only(act.FirstToken, say(side, H, Done(first=FIRST, num_chunks=3))).output.token_ids == (42,)
    opened = only(act.OpenStream, say(side, H, QUIET))
    assert opened.message.request.sampling.ignore_eos, "the other must not end where the first did"
    say(side, H2, Accepted(cached_tokens=0), Started(), ready("x", 4, 8), ready("y", 8, 10))
    assert none_of(act.FirstToken, say(side, H2, Done(first=FIRST, num_chunks=2)))


@pytest.mark.covers("C10")
def test_every_end_closes_both_streams() -> None:
    released = hedged().release("r")
    assert closed(released) == [H2, H]
    assert outcome(released) == ("abandoned", "p", "q")
    assert none_of(act.Hedged, transferring().release("r")), "there was none"
    late = hedged()
    assert closed(late.tick(101.0)) == [H2, H]
    assert late.is_idle
    bad = hedged()
    failed = say(bad, H2, Refused(error=NumericalError("NaN")))
    assert closed(failed) == [H2, H]
    assert only(act.Fail, failed).request_id == "r"


def test_pieces_of_a_stream_that_was_given_up_come_too_late() -> None:
    side = hedged()
    say(side, H2, Accepted(cached_tokens=0), Started(), ready("x", 4, 8))
    assert side.on_arrived(H, "b", 1.0) == []
    assert side.on_failed(H, "b", "connection", 1.0) == []
    assert side.snapshot()["late"] == 2


def test_a_hedge_that_does_not_answer_is_dropped_like_any_stream() -> None:
    side = hedged()
    say(side, H2, LEFT)
    assert outcome(side.tick(1.0 + 10.0))[0] == "refused"
    assert CONFIG.dead_after_s < 10.0, "the quiet one was dead long before that"
