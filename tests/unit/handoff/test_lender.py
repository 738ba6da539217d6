"""D lends what it holds: within credit and buffer, no longer than a lease, and not what it does not hold."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from jdisagg.core.config import TransferConfig
from jdisagg.handoff import actions as act
from jdisagg.handoff.lender import Lender
from jdisagg.handoff.messages import Ack, Declined, Grant, HandoffId, Want
from tests.unit.handoff.rig import BPT, CONFIG, H, only, ready

WANT = Want(begin=2, end=11, reason="held")


def lender(held_tokens: int = 11, settings: TransferConfig = CONFIG) -> Lender:
    """One stream is open."""
    keys = itertools.count()
    side = Lender(settings, bytes_per_token=BPT, new_key=lambda: f"k{next(keys)}")
    side.open(H, held_tokens)
    return side


def spans(actions: object) -> list[tuple[int, int]]:
    """What is exported."""
    return [(a.begin, a.end) for a in actions if isinstance(a, act.Export)]  # type: ignore[attr-defined]


def test_nothing_is_published_without_credit_and_never_more_than_that() -> None:
    side = lender()
    assert side.on_message(H, WANT, 1.0) == []
    assert spans(side.on_message(H, Grant(credit_bytes=79), 1.0)) == [(2, 6)]
    assert spans(side.on_message(H, Grant(credit_bytes=80), 1.0)) == [(6, 10)]
    assert spans(side.on_message(H, Grant(credit_bytes=40), 1.0)) == []
    assert side._exports.buffered_bytes == 80
    assert spans(side.on_message(H, Grant(credit_bytes=1000), 1.0)) == [(10, 11)]


def test_acknowledged_pieces_are_freed_and_the_last_one_ends_the_loan() -> None:
    side = lender()
    side.on_message(H, WANT, 1.0)
    side.on_message(H, Grant(credit_bytes=1000), 1.0)
    assert side.on_published(H, ready("k0", 2, 6), 1.1) == [act.Send(H, ready("k0", 2, 6))]
    assert side.on_published(H, ready("k0", 2, 6), 1.1) == [], "once"
    for number in range(3):
        assert side.num_loans == 1
        assert side.on_message(H, Ack(key=f"k{number}"), 1.2) == [act.Discard(f"k{number}")]
    assert (side.num_loans, side._exports.buffered_bytes, side.is_idle) == (0, 0, False)
    assert side.on_published(H, ready("k1", 6, 10), 1.3) == [act.Discard("k1")], "too late"
    assert side.on_message(H, Ack(key="k1"), 1.3) == []
    side.release(H)
    assert side.is_idle


def test_pieces_that_stay_on_the_device_fill_the_buffer_until_p_has_them() -> None:
    side = lender(settings=replace(CONFIG, transfer_buffer_bytes=2 * CONFIG.transfer_chunk_tokens * BPT))
    side.on_message(H, replace(WANT, piece_tokens=1), 1.0)
    assert spans(side.on_message(H, Grant(credit_bytes=1000), 1.0)) == [(2, 3), (3, 4)]
    assert spans(side.on_published(H, ready("k0", 2, 3), 1.1, stays_tokens=CONFIG.transfer_chunk_tokens)) == []
    assert spans(side.on_message(H, Ack(key="k0"), 1.2)) == [(4, 5)]


def test_pieces_are_no_longer_than_p_can_take() -> None:
    side = lender()
    side.on_message(H, Want(begin=2, end=8, reason="held", piece_tokens=3), 1.0)
    assert spans(side.on_message(H, Grant(credit_bytes=1000), 1.0)) == [(2, 5), (5, 8)]


@pytest.mark.parametrize(("begin", "end", "group"), [(2, 12, 0), (5, 5, 0), (-1, 4, 0), (7, 3, 0), (2, 8, 1)])
def test_what_is_not_held_is_declined(begin: int, end: int, group: int) -> None:
    actions = lender().on_message(H, Want(begin=begin, end=end, reason="held", group=group), 1.0)
    assert isinstance(only(act.Send, actions).message, Declined)


def test_a_second_want_ends_the_first_loan() -> None:
    side = lender()
    side.on_message(H, WANT, 1.0)
    side.on_message(H, Grant(credit_bytes=40), 1.0)
    actions = side.on_message(H, WANT, 1.0)
    assert actions[0] == act.Discard("k0")
    assert isinstance(only(act.Send, actions).message, Declined)
    assert side.num_loans == 0


def test_the_end_of_the_stream_frees_everything_and_makes_room_for_others_once_it_is_over() -> None:
    """Not at once: another stream of the same request may be next, and that has lost its pages."""
    other = HandoffId("s", 2)
    side = lender(settings=TransferConfig(transfer_chunk_tokens=4, transfer_buffer_bytes=40))
    side.open(other, 6)
    side.on_message(H, WANT, 1.0)
    side.on_message(other, Want(begin=0, end=6, reason="held"), 1.0)
    assert spans(side.on_message(H, Grant(credit_bytes=1000), 1.0)) == [(2, 6)]
    assert spans(side.on_message(other, Grant(credit_bytes=1000), 1.0)) == [], "the buffer is full"
    assert side.release(H) == [act.Discard("k0")]
    assert side.release(H) == []
    assert spans(side.tick(1.1)) == [(0, 4)]
    assert side.on_message(H, WANT, 2.0) == []


@pytest.mark.parametrize("piece_tokens", [-1, -(2**31)])
def test_pieces_of_fewer_than_no_tokens_are_declined(piece_tokens: int) -> None:
    side = lender()
    want = Want(begin=2, end=11, reason="held", piece_tokens=piece_tokens)
    declined = only(act.Send, side.on_message(H, want, 0.0))
    assert declined.handoff == H
    assert "in pieces of -" in declined.message.reason  # type: ignore[union-attr]
    assert side.on_message(H, Grant(credit_bytes=1000), 0.0) == []


def test_pieces_nobody_fetches_are_taken_back_after_the_lease() -> None:
    side = lender()
    side.on_message(H, WANT, 1.0)
    side.on_message(H, Grant(credit_bytes=40), 2.0)
    side.on_published(H, ready("k0", 2, 6), 3.0)
    assert side.tick(3.0 + CONFIG.lease_s - 0.01) == []
    actions = side.tick(3.0 + CONFIG.lease_s)
    assert actions[0] == act.Discard("k0")
    assert "not fetched" in only(act.Send, actions).message.reason  # type: ignore[union-attr]
    assert side.tick(100.0) == []


def test_time_in_which_the_lender_stood_still_is_not_of_the_lease() -> None:
    side = lender()
    side.on_message(H, WANT, 1.0)
    side.on_message(H, Grant(credit_bytes=40), 2.0)
    side.on_published(H, ready("k0", 2, 6), 3.0)
    assert side.tick(3.1) == []
    assert side.tick(63.1) == []
    assert side.tick(63.1 + CONFIG.lease_s)[0] == act.Discard("k0")


def test_a_piece_that_cannot_be_published_ends_the_loan() -> None:
    side = lender()
    side.on_message(H, WANT, 1.0)
    side.on_message(H, Grant(credit_bytes=1000), 1.0)
    actions = side.on_publish_failed(H, "k1", "device")
    assert [action for action in actions if isinstance(action, act.Discard)] == [act.Discard(f"k{i}") for i in range(3)]
    assert "device" in only(act.Send, actions).message.reason  # type: ignore[union-attr]
    assert side.on_publish_failed(H, "k1", "device") == []


def test_a_failed_publication_of_a_loan_that_is_over_ends_no_later_one() -> None:
    side = lender()
    for _ in range(2):
        side.on_message(H, WANT, 1.0)
        side.on_message(H, Grant(credit_bytes=40), 1.0)
        assert side.num_loans == 1
        side.on_publish_failed(H, "k0", "device")
    assert side.num_loans == 1
