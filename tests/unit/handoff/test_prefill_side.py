"""P's bookkeeping: what is cut when, what is bounded, and that every way out frees everything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.errors import DeadlineExceeded, HandoffLost, InvalidRequest, Overloaded
from jdisagg.core.requests import FinishReason, Output
from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import Accepted, Ack, Done, Grant, HandoffId, Open, Parked, Refused, Started, StreamEnded, Want
from jdisagg.handoff.outbound import MOST_AGAIN
from jdisagg.handoff.prefill_side import PrefillSide
from tests.unit.handoff.rig import CONFIG, FIRST, H, exports, none_of, only, prefill_side, ready, request

LOTS = Grant(credit_bytes=10_000)


def opened(side: PrefillSide, handoff: HandoffId = H, num_tokens: int = 10, held: int = 0, *, credit: bool = True) -> None:
    side.open(handoff, Open(request=request(num_tokens), held_tokens=held, backend="fake"), 0.0)
    side.on_admitted(handoff, 0)
    if credit:
        side.on_message(handoff, LOTS, 0.0)


@pytest.mark.covers("C03")
def test_whole_chunks_leave_while_computing_and_the_rest_goes_with_the_end() -> None:
    side = prefill_side()
    opened(side, num_tokens=11, held=1)
    assert exports(side.on_computed("r#1", 4)) == []
    assert exports(side.on_computed("r#1", 10)) == [(1, 5), (5, 9)]
    assert exports(side.on_computed("r#1", 10)) == [], "told twice"
    assert exports(side.on_computed("r#1", 11)) == [(9, 11)]


@pytest.mark.covers("C06")
@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_credit_counts_whenever_it_comes(step: int) -> None:
    side = prefill_side()
    steps = [
        lambda: side.open(H, Open(request=request(10), held_tokens=0, backend="fake"), 0.0),
        lambda: side.on_admitted(H, 0),
        lambda: side.on_computed("r#1", 4),
        lambda: side.on_computed("r#1", 9),
    ]
    actions: list[act.PrefillAction] = []
    for number, happens in enumerate(steps):
        actions += happens()
        if number == step:
            actions += side.on_message(H, LOTS, 0.0)
    assert exports(actions) == [(0, 4), (4, 8)]


@pytest.mark.covers("C02")
def test_pieces_are_no_longer_than_d_takes_and_no_longer_than_p_cuts() -> None:
    for wanted, lengths in ((3, [3, 3, 3, 1]), (4, [4, 4, 2]), (100, [4, 4, 2]), (None, [4, 4, 2])):
        side = prefill_side()
        side.open(H, Open(request=request(10), held_tokens=0, backend="fake", max_piece_tokens=wanted), 0.0)
        side.on_admitted(H, 0)
        side.on_message(H, LOTS, 0.0)
        spans = exports(side.on_computed("r#1", 10))
        assert [end - begin for begin, end in spans] == lengths
        done = only(act.Reply, side.on_first_token("r#1", FIRST)).message
        assert isinstance(done, Done)
        assert done.num_chunks == len(lengths)
        assert none_of(act.Export, side.on_message(H, Want(begin=0, end=lengths[0] + 1, reason="x"), 0.0))


@pytest.mark.covers("X23")
def test_nothing_is_cut_for_a_prompt_that_d_holds() -> None:
    side = prefill_side()
    opened(side, held=10)
    assert exports(side.on_computed("r#1", 10)) == []
    actions = side.on_first_token("r#1", FIRST)
    done = only(act.Reply, actions).message
    assert isinstance(done, Done)
    assert done.num_chunks == 0
    assert actions[1:] == [act.ReleaseRequest("r#1"), act.CloseReply(H)]


def test_a_first_token_means_that_everything_is_computed() -> None:
    side = prefill_side()
    opened(side, num_tokens=6)
    assert exports(side.on_computed("r#1", 4)) == [(0, 4)]
    assert exports(side.on_first_token("r#1", FIRST)) == [(4, 6)]


def test_done_announces_the_pieces_still_to_come() -> None:
    side = prefill_side()
    opened(side, credit=False)
    side.on_computed("r#1", 10)
    done = only(act.Reply, side.on_first_token("r#1", FIRST)).message
    assert isinstance(done, Done)
    assert done.num_chunks == 3
    assert exports(side.on_message(H, Grant(credit_bytes=40), 0.0)) == [(0, 4)]
    assert exports(side.on_message(H, Grant(credit_bytes=79), 0.0)) == [], "credit for one piece and a bit"
    assert exports(side.on_message(H, Grant(credit_bytes=40), 0.0)) == [], "credit never shrinks or counts twice"
    assert exports(side.on_message(H, Grant(credit_bytes=100), 0.0)) == [(4, 8), (8, 10)]


def test_the_buffer_is_shared_in_turns_and_nobody_overtakes_a_piece_that_does_not_fit() -> None:
    side = prefill_side(replace(CONFIG, transfer_buffer_bytes=90))
    a, b, c = HandoffId("a", 1), HandoffId("b", 2), HandoffId("c", 3)
    for handoff, size in ((a, 12), (b, 12), (c, 1)):
        opened(side, handoff, size)
    assert exports(side.on_computed("a#1", 12)) == [(0, 4), (4, 8)]
    assert side.on_computed("b#2", 12) == []
    assert side.on_computed("c#3", 1) == [], "one token would fit, but a and b were first"
    assert side.buffered_bytes == 80
    freed = side.on_message(a, Ack(key="k0"), 0.0)
    assert [x.handoff for x in freed if isinstance(x, act.Export)] == [a]
    freed = side.on_message(a, Ack(key="k1"), 0.0)
    assert [x.handoff for x in freed if isinstance(x, act.Export)] == [b, c], "in turns"
    assert side.buffered_bytes == 90
    freed = side.on_message(a, Ack(key="k2"), 0.0)
    assert [x.handoff for x in freed if isinstance(x, act.Export)] == [b]


def test_a_piece_larger_than_the_buffer_goes_alone() -> None:
    side = prefill_side(replace(CONFIG, transfer_buffer_bytes=5))
    opened(side)
    assert exports(side.on_computed("r#1", 10)) == [(0, 4)]
    assert exports(side.on_message(H, Ack(key="k0"), 0.0)) == [(4, 8)]


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
    assert side.buffered_bytes == 0


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
    assert side.on_publish_failed(H, "k0", "device", 0.0) == []
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
    assert side.counts()["ended"] == 1
    assert side.snapshot()["handoffs"]["r#1"]["stage"] == "ended"
    assert side.on_published(H, ready("k1", 4, 8), 1.0)[-1] == act.Discard("k1"), "it was on its way from the device"
    assert side.on_message(H, Want(begin=0, end=4, reason="x"), 2.0) == [], "the engine may have no pages of it any more"
    assert side.on_computed("r#1", 10) == []
    assert side.on_message(H, StreamEnded(reason="closed"), 2.0)[0] == act.Discard("k0")
    assert side.is_idle
    assert side.buffered_bytes == 0


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


def test_a_request_with_one_token_to_go_publishes_nothing_even_with_credit() -> None:
    side = prefill_side()
    side.open(H, Open(request=request(max_tokens=1), held_tokens=0, backend="fake"), 0.0)
    side.on_admitted(H, 0)
    side.on_message(H, LOTS, 0.0)
    assert side.on_computed("r#1", 10) == []


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


def test_a_range_is_published_again_under_a_new_key() -> None:
    side = prefill_side()
    opened(side)
    side.on_computed("r#1", 10)
    side.on_first_token("r#1", FIRST)
    actions = side.on_message(H, Want(begin=4, end=8, reason="checksum"), 0.0)
    assert actions == [act.Discard("k1"), act.Export(H, "r#1", 4, 8, "k3")]
    for key in ("k0", "k2"):
        assert none_of(act.ReleaseRequest, side.on_message(H, Ack(key=key), 0.0))
    assert act.ReleaseRequest("r#1") in side.on_message(H, Ack(key="k3"), 0.0)
    assert side.is_idle


@pytest.mark.parametrize("span", [(2, 6), (6, 10), (3, 5), (8, 10)])
def test_any_part_of_what_was_published_can_be_asked_for_again(span: tuple[int, int]) -> None:
    side = prefill_side()
    opened(side, num_tokens=12, held=2)
    assert exports(side.on_computed("r#1", 11)) == [(2, 6), (6, 10)]
    again = side.on_message(H, Want(begin=span[0], end=span[1], reason="x"), 0.0)
    assert exports(again) == [span]
    keys = {(2, 6): "k0", (6, 10): "k1"}
    assert [action for action in again if isinstance(action, act.Discard)] == [act.Discard(keys[s]) for s in keys if s == span]


@pytest.mark.parametrize("takes", [True, False])
def test_who_wants_it_all_again_without_end_is_refused(takes: bool) -> None:
    """`takes`: with credit for whatever it wants; else the ranges it wants would heap up."""
    side = prefill_side()
    opened(side, num_tokens=9, credit=False)
    side.on_message(H, Grant(credit_bytes=10**9 if takes else 90), 0.0)
    side.on_computed("r#1", 9)
    side.on_first_token("r#1", FIRST)
    for number in range(3 * MOST_AGAIN):
        begin = 4 * (number % 2)
        assert none_of(act.Reply, side.on_message(H, Want(begin=begin, end=begin + 4, reason="checksum"), 0.0))
    refused = only(act.Reply, side.on_message(H, Want(begin=0, end=4, reason="checksum"), 0.0)).message
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, HandoffLost)
    assert "[0, 4)" in refused.error.message
    assert side.is_idle
    assert side.buffered_bytes == 0


@pytest.mark.parametrize(("begin", "end"), [(0, 5), (8, 12), (4, 4), (-1, 3)])
def test_only_published_tokens_can_be_asked_for_again(begin: int, end: int) -> None:
    side = prefill_side()
    opened(side, num_tokens=13)
    side.on_computed("r#1", 9)
    refused = only(act.Reply, side.on_message(H, Want(begin=begin, end=end, reason="x"), 0.0)).message
    assert isinstance(refused, Refused)
    assert f"[{begin}, {end})" in refused.error.message
    assert side.is_idle


def test_a_failed_publication_is_repeated_twice_and_costs_no_credit() -> None:
    side = prefill_side()
    opened(side, num_tokens=4, credit=False)
    side.on_computed("r#1", 4)
    assert exports(side.on_message(H, Grant(credit_bytes=40), 0.0)) == [(0, 4)]
    for key in ("k0", "k1"):
        actions = side.on_publish_failed(H, key, "device", 0.0)
        assert actions[0] == act.Discard(key)
        assert exports(actions) == [(0, 4)]
    done = only(act.Reply, side.on_first_token("r#1", FIRST)).message
    assert isinstance(done, Done)
    assert done.num_chunks == 1
    refused = only(act.Reply, side.on_publish_failed(H, "k2", "device", 0.0)).message
    assert isinstance(refused, Refused)
    assert "device" in refused.error.message
    assert side.is_idle


def test_a_publication_that_failed_is_not_the_newer_one_of_its_range() -> None:
    side = prefill_side()
    opened(side, num_tokens=4)
    assert exports(side.on_computed("r#1", 4)) == [(0, 4)]
    again = side.on_message(H, Want(begin=0, end=4, reason="lost"), 0.0)
    assert [action.key for action in again if isinstance(action, act.Export)] == ["k1"]
    assert side.on_publish_failed(H, "k0", "device", 0.0) == []
    assert side.snapshot()["late"] == 1
    replies = [action for action in side.on_published(H, ready("k1", 0, 4), 0.0) if isinstance(action, act.Reply)]
    assert [reply.message for reply in replies] == [ready("k1", 0, 4)]


def test_duplicate_acks_and_publications_change_nothing() -> None:
    side = prefill_side()
    opened(side)
    side.on_computed("r#1", 10)
    assert side.on_published(H, ready("k0", 0, 4), 0.0) == [act.Reply(H, ready("k0", 0, 4))]
    assert side.on_published(H, ready("k0", 0, 4), 0.0) == []
    assert side.on_message(H, Ack(key="k0"), 0.0) == [act.Discard("k0")]
    assert side.on_message(H, Ack(key="k0"), 0.0) == []
    assert side.buffered_bytes == 60


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


def test_illegal_stage_changes_are_our_bug() -> None:
    side = prefill_side()
    opened(side)
    with pytest.raises(AssertionError, match="computing -> computing"):
        side.on_admitted(H, 0)
    with pytest.raises(AssertionError, match="open already"):
        side.open(H, Open(request=request(), held_tokens=0, backend="fake"), 0.0)


def test_keys_cannot_be_guessed_and_are_new_each_time() -> None:
    side = PrefillSide(CONFIG, bytes_per_token=10)
    opened(side)
    keys = [a.key for a in side.on_computed("r#1", 10) if isinstance(a, act.Export)]
    assert len(set(keys)) == 3
    assert all(len(key) >= 22 for key in keys)


def test_accepted_carries_the_prefix_hits_and_counts_follow_the_stage() -> None:
    side = prefill_side()
    side.open(H, Open(request=request(), held_tokens=0, backend="fake"), 0.0)
    assert side.counts() == {"queued": 1, "computing": 0, "computed": 0, "parked": 0, "ended": 0}
    assert side.on_admitted(H, 7) == [act.Reply(H, Accepted(cached_tokens=7))]
    assert side.counts() == {"queued": 0, "computing": 1, "computed": 0, "parked": 0, "ended": 0}
    assert side.snapshot()["handoffs"]["r#1"]["stage"] == "computing"


def test_a_computed_prompt_whose_receiver_has_no_pages_stands_back_and_is_computed_again_with_the_first_grant() -> None:
    side = prefill_side()
    opened(side, credit=False)
    side.on_computed("r#1", 10)
    assert side.parkable() == (), "its token is not told"
    side.on_first_token("r#1", FIRST)
    assert side.parkable() == ("r#1",)
    assert only(act.Reply, side.on_parked("r#1")).message == Parked()
    assert side.parkable() == ()
    assert side.snapshot()["handoffs"]["r#1"]["stage"] == "parked"
    assert not side.is_awaited
    assert side.on_message(H, LOTS, 0.0) == [act.Unpark("r#1")], "nothing to cut: its KV is gone"
    assert side.is_awaited
    assert side.on_message(H, LOTS, 0.0) == [], "asked for once"
    assert side.parkable() == (), "its receiver has pages now"
    assert side.on_started("r#1") == []
    assert exports(side.on_computed("r#1", 4)) == [(0, 4)]
    last = side.on_first_token("r#1", FIRST)
    assert exports(last) == [(4, 8), (8, 10)]
    assert none_of(act.Reply, last), "the token was told before"
    assert not side.is_awaited


@pytest.mark.parametrize("nothing", [0, -5])
def test_a_grant_of_nothing_has_no_prompt_computed_again(nothing: int) -> None:
    side = prefill_side()
    opened(side, credit=False)
    side.on_first_token("r#1", FIRST)
    side.on_parked("r#1")
    assert side.on_message(H, Grant(credit_bytes=nothing), 0.0) == []
    assert side.counts()["parked"] == 1
    assert side.on_message(H, LOTS, 0.0) == [act.Unpark("r#1")]


def test_a_stream_that_ends_while_its_prompt_stands_back_is_released() -> None:
    side = prefill_side()
    opened(side, credit=False)
    side.on_first_token("r#1", FIRST)
    side.on_parked("r#1")
    assert only(act.ReleaseRequest, side.on_message(H, StreamEnded(reason="closed"), 0.0)).engine_request_id == "r#1"
    assert side.is_idle


def test_who_is_awaited_has_pages_at_its_receiver_and_no_kv_here() -> None:
    side = prefill_side()
    opened(side, credit=False)
    assert only(act.Reply, side.on_started("r#1")).message == Started()
    assert not side.is_awaited, "its receiver has no pages"
    side.on_message(H, LOTS, 0.0)
    assert side.is_awaited
    side.on_computed("r#1", 10)
    assert not side.is_awaited
