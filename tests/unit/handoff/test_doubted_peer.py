"""A P that is doubted and speaks again: it goes on where it was, or refuses, and what it sent meanwhile counts."""

from __future__ import annotations

from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import Accepted, Awake, Done, Grant, HandoffId, Started
from tests.unit.handoff.hedge_rig import QUIET, closed, hedged, outcome, say, transferring
from tests.unit.handoff.rig import FIRST, H2, LEFT, H, decode_side, none_of, only, ready, request, stages


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
    assert stages(side) == ["accepted"]


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
    say(side, H, LEFT, now_s=20.0)
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


def test_a_peer_that_flaps_is_given_up_in_time_all_the_same() -> None:
    """Heartbeats are no progress: only the time in doubt is added."""
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    say(side, H, LEFT, now_s=0.0)
    now_s = 0.0
    while not (lost := side.tick(now_s)):
        say(side, HandoffId("r", 1), QUIET, now_s=now_s + 0.6)
        say(side, HandoffId("r", 1), Awake(), now_s=now_s + 0.7)
        now_s += 1.0
        assert now_s < 15.0
    assert only(act.Recovered, lost).cause == "no answer for 10 s"


def test_one_that_comes_back_is_given_up_when_its_own_time_is_over_and_not_when_that_of_the_hedge_is() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    say(side, H, LEFT, now_s=0.0)
    say(side, H, QUIET, now_s=9.5)
    assert side.tick(10.1) == []
    say(side, H, Awake(), now_s=10.25)
    assert side.tick(10.7) == []
    assert only(act.Recovered, side.tick(10.75)).cause == "no answer for 10 s"
