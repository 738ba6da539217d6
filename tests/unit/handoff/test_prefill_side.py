"""P's bookkeeping: what is cut when, what is bounded by credit and buffer, and what D is told of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import Accepted, Ack, Done, Grant, HandoffId, Open, Want
from jdisagg.handoff.prefill_side import PrefillSide
from tests.unit.handoff.rig import CONFIG, FIRST, LOTS, H, exports, none_of, only, opened, prefill_side, ready, request, stages


@pytest.mark.covers("C03")
def test_whole_chunks_leave_while_computing_and_the_rest_goes_with_the_end() -> None:
    side = prefill_side()
    opened(side, num_tokens=11, held=1)
    assert exports(side.on_computed("r#1", 4)) == []
    assert exports(side.on_computed("r#1", 10)) == [(1, 5), (5, 9)]
    assert exports(side.on_computed("r#1", 10)) == [], "told twice"
    assert exports(side.on_computed("r#1", 11)) == [(9, 11)]


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_engine_hears_whether_a_client_has_some_of_the_answer(goes_on: bool) -> None:
    opening = Open(request=request(), held_tokens=0, backend="fake", goes_on=goes_on)
    assert only(act.Admit, prefill_side().open(H, opening, 0.0)).goes_on is goes_on


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
    assert side._exports.buffered_bytes == 80
    freed = side.on_message(a, Ack(key="k0"), 0.0)
    assert [x.handoff for x in freed if isinstance(x, act.Export)] == [a]
    freed = side.on_message(a, Ack(key="k1"), 0.0)
    assert [x.handoff for x in freed if isinstance(x, act.Export)] == [b, c], "in turns"
    assert side._exports.buffered_bytes == 90
    freed = side.on_message(a, Ack(key="k2"), 0.0)
    assert [x.handoff for x in freed if isinstance(x, act.Export)] == [b]


def test_a_piece_larger_than_the_buffer_goes_alone() -> None:
    side = prefill_side(replace(CONFIG, transfer_buffer_bytes=5))
    opened(side)
    assert exports(side.on_computed("r#1", 10)) == [(0, 4)]
    assert exports(side.on_message(H, Ack(key="k0"), 0.0)) == [(4, 8)]


def test_a_request_with_one_token_to_go_publishes_nothing_even_with_credit() -> None:
    side = prefill_side()
    side.open(H, Open(request=request(max_tokens=1), held_tokens=0, backend="fake"), 0.0)
    side.on_admitted(H, 0)
    side.on_message(H, LOTS, 0.0)
    assert side.on_computed("r#1", 10) == []


def test_duplicate_acks_and_publications_change_nothing() -> None:
    side = prefill_side()
    opened(side)
    side.on_computed("r#1", 10)
    assert side.on_published(H, ready("k0", 0, 4), 0.0) == [act.Reply(H, ready("k0", 0, 4))]
    assert side.on_published(H, ready("k0", 0, 4), 0.0) == []
    assert side.on_message(H, Ack(key="k0"), 0.0) == [act.Discard("k0")]
    assert side.on_message(H, Ack(key="k0"), 0.0) == []
    assert side._exports.buffered_bytes == 60


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
    assert stages(side) == ["queued"]
    assert side.on_admitted(H, 7) == [act.Reply(H, Accepted(cached_tokens=7))]
    assert stages(side) == ["computing"]
    assert side.snapshot()["handoffs"]["r#1"]["stage"] == "computing"
