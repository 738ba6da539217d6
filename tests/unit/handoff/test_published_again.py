"""Pieces that P publishes again: what D may ask for, how often, and what failed on its way from the device."""

from __future__ import annotations

import pytest

from jdisagg.core.errors import HandoffLost
from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import Ack, Done, Grant, Refused, Want
from jdisagg.handoff.outbound import MOST_AGAIN
from tests.unit.handoff.rig import FIRST, H, exports, none_of, only, opened, prefill_side, ready


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
    assert side._exports.buffered_bytes == 0


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
        actions = side.on_publish_failed(H, key, "device")
        assert actions[0] == act.Discard(key)
        assert exports(actions) == [(0, 4)]
    done = only(act.Reply, side.on_first_token("r#1", FIRST)).message
    assert isinstance(done, Done)
    assert done.num_chunks == 1
    refused = only(act.Reply, side.on_publish_failed(H, "k2", "device")).message
    assert isinstance(refused, Refused)
    assert "device" in refused.error.message
    assert side.is_idle


def test_a_publication_that_failed_is_not_the_newer_one_of_its_range() -> None:
    side = prefill_side()
    opened(side, num_tokens=4)
    assert exports(side.on_computed("r#1", 4)) == [(0, 4)]
    again = side.on_message(H, Want(begin=0, end=4, reason="lost"), 0.0)
    assert [action.key for action in again if isinstance(action, act.Export)] == ["k1"]
    assert side.on_publish_failed(H, "k0", "device") == []
    assert side.snapshot()["late"] == 1
    replies = [action for action in side.on_published(H, ready("k1", 0, 4), 0.0) if isinstance(action, act.Reply)]
    assert [reply.message for reply in replies] == [ready("k1", 0, 4)]
