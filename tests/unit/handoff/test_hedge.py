"""A P that falls quiet is doubted: another one is asked, and whoever acts first has the request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import InvalidRequest, NumericalError, Overloaded
from jdisagg.core.requests import FinishReason, Output
from jdisagg.handoff import actions as act
from jdisagg.handoff.decode_side import DecodeSide
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
from tests.unit.handoff.rig import CONFIG, FIRST, NEVER, H, decode_side, none_of, only, ready, request

H2, H3 = HandoffId("r", 2), HandoffId("r", 3)
QUIET = Quiet(0.6)
SILENCE = StreamEnded(reason="heartbeat")


def say(side: DecodeSide, handoff: HandoffId, *messages: PrefillToDecode, now_s: float = 1.0) -> list[act.DecodeAction]:
    """What follows from the last of them."""
    actions: list[act.DecodeAction] = []
    for message in messages:
        actions = side.on_message(handoff, message, now_s)
    return actions


def transferring(*peers: str, config: TransferConfig = CONFIG) -> DecodeSide:
    """[0, 4) is in place, [4, 8) is being fetched, [8, 10) is not announced."""
    side = decode_side(config)
    side.start(request(), 0, peers or ("p", "q"), 0.0)
    say(side, H, Accepted(cached_tokens=0), Started())
    side.on_reserved("r", 0.0)
    say(side, H, ready("a", 0, 4), ready("b", 4, 8))
    side.on_arrived(H, "a", 0.0)
    return side


def hedged(*peers: str, config: TransferConfig = CONFIG) -> DecodeSide:
    side = transferring(*peers, config=config)
    say(side, H, QUIET)
    return side


def closed(actions: Sequence[act.DecodeAction]) -> list[HandoffId]:
    """Streams that end, whose fetches end with them."""
    handoffs = [action.handoff for action in actions if isinstance(action, act.CloseStream)]
    assert [action.handoff for action in actions if isinstance(action, act.CancelFetch)] == handoffs
    return handoffs


def outcome(actions: Sequence[act.DecodeAction]) -> tuple[str, str, str]:
    ended = only(act.Hedged, actions)
    assert ended.request_id == "r"
    return ended.outcome, ended.peer, ended.other


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


def test_a_quiet_one_that_speaks_first_goes_on_where_it_was() -> None:
    side = hedged()
    say(side, H2, Accepted(cached_tokens=0))
    back = say(side, H, Awake(), now_s=2.0)
    assert closed(back) == [H2]
    assert outcome(back) == ("returned", "p", "q")
    assert act.PeerReady("r") in back, "it computes: pages may be reserved"
    assert none_of(act.Fetch, back), "what is on its way is not fetched twice"
    assert none_of(act.Recovered, back)
    assert say(side, H2, Started()) == [], "the hedge is gone"
    say(side, H, ready("c", 8, 10), Done(first=FIRST, num_chunks=3))
    side.on_arrived(H, "b", 2.0)
    done = only(act.KVComplete, side.on_arrived(H, "c", 2.0))
    assert done.provenance.recoveries == ()
    assert done.provenance.prefill_worker == "p"
    assert side.is_idle


def test_a_message_of_the_quiet_one_is_as_good_as_a_heartbeat() -> None:
    side = hedged()
    actions = say(side, H, ready("c", 8, 10))
    assert outcome(actions)[0] == "returned"
    assert only(act.Fetch, actions).ready.key == "c"


def test_what_arrives_of_a_doubted_stream_counts_and_all_of_it_ends_the_hedge() -> None:
    side = transferring()
    say(side, H, ready("c", 8, 10), Done(first=FIRST, num_chunks=3), QUIET)
    say(side, H2, Accepted(cached_tokens=0), Started())
    arrived = side.on_arrived(H, "b", 1.0)
    assert only(act.Import, arrived).handoff == H
    assert none_of(act.CloseStream, arrived), "some is missing"
    complete = side.on_arrived(H, "c", 1.0)
    assert closed(complete) == [H2, H]
    assert outcome(complete) == ("returned", "p", "q")
    assert only(act.KVComplete, complete).provenance.recoveries == ()
    assert side.is_idle


def test_a_fetch_that_fails_while_its_peer_is_doubted_is_tried_again_when_it_is_back() -> None:
    side = hedged()
    assert side.on_failed(H, "b", "connection", 1.0) == []
    assert only(act.Fetch, say(side, H, Awake())).ready.key == "b"
    assert only(act.Recovered, side.on_failed(H, "b", "connection", 2.0)).rung == "refetch", "it has all its tries"


def test_one_that_had_not_begun_reserves_no_pages_when_it_comes_back() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    say(side, H, Accepted(cached_tokens=0), QUIET)
    back = say(side, H, Awake())
    assert none_of(act.PeerReady, back)
    assert none_of(act.Fetch, back)
    assert side.counts()["accepted"] == 1


def test_nothing_is_fetched_of_one_that_comes_back_before_there_are_pages() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    say(side, H, Accepted(cached_tokens=0), Started(), ready("a", 0, 4), QUIET)
    back = say(side, H, Awake())
    assert outcome(back)[0] == "returned"
    assert none_of(act.Fetch, back)
    assert only(act.Fetch, side.on_reserved("r", 1.0)).ready.key == "a"


def test_one_that_comes_back_has_its_time_to_answer_anew() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 20.0)
    say(side, H, QUIET, now_s=21.0)
    say(side, H, Awake(), now_s=29.0)
    assert side.tick(37.9) == [], "8 s were nobody's"
    assert only(act.Recovered, side.tick(38.1)).cause == "no answer for 10 s"


def test_pages_that_came_while_it_was_quiet_are_granted_when_it_is_back() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    say(side, H, Accepted(cached_tokens=0), Started(), QUIET)
    side.on_reserved("r", 1.0)
    assert act.Send(H, Grant(credit_bytes=160)) in say(side, H, Awake())


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


def test_a_peer_that_flaps_is_given_up_in_time_all_the_same() -> None:
    """Heartbeats are no progress: only the time in doubt is added."""
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    now_s = 0.0
    while not (lost := side.tick(now_s)):
        say(side, HandoffId("r", 1), QUIET, now_s=now_s + 0.6)
        say(side, HandoffId("r", 1), Awake(), now_s=now_s + 0.7)
        now_s += 1.0
        assert now_s < 15.0
    assert only(act.Recovered, lost).cause == "no answer for 10 s"


def test_a_hedge_that_does_not_answer_is_dropped_like_any_stream() -> None:
    side = hedged()
    assert outcome(side.tick(1.0 + 10.0))[0] == "refused"
    assert CONFIG.dead_after_s < 10.0, "the quiet one was dead long before that"
