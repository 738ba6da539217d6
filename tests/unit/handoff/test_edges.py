"""What comes too late, twice, or at the very limit, on streams that go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import Overloaded, Unavailable
from jdisagg.handoff import actions as act
from jdisagg.handoff.borrower import Borrowed, Borrower, Outcome
from jdisagg.handoff.credit import WINDOW_BYTES, Credit, most_arriving_of, window_bytes_of
from jdisagg.handoff.exports import ExportQueue, unguessable_key
from jdisagg.handoff.lender import Lender
from jdisagg.handoff.messages import (
    Accepted,
    Ack,
    Agreed,
    Declined,
    Done,
    Grant,
    HandoffId,
    Lending,
    Open,
    Parked,
    StreamEnded,
    Want,
)
from jdisagg.handoff.outbound import Outbound, OutgoingPiece
from tests.unit.handoff.rig import (
    BPT,
    CONFIG,
    FIRST,
    H2,
    LEFT,
    NEVER,
    H,
    decode_side,
    none_of,
    only,
    prefill_side,
    ready,
    request,
    stages,
)

LENDING = Lending(address="d0:1", backend="fake", dtype="float32")
OTHER = HandoffId("other", 2)


# --- credit


@pytest.mark.parametrize(
    ("chunk_tokens", "buffer_bytes", "window"),
    [
        (4, 1000, 1000),  # all of the buffer
        (4, 79, 80),  # two pieces of 40 bytes, whatever the buffer
        (4, 2**40, WINDOW_BYTES),  # small pieces: a fixed amount
        (2**20, 2**40, 4 * 10 * 2**20),  # four pieces when they are large
    ],
)
def test_the_window_is_four_pieces_or_enough_within_the_buffer_and_two_pieces_always(
    chunk_tokens: int, buffer_bytes: int, window: int
) -> None:
    config = TransferConfig(transfer_chunk_tokens=chunk_tokens, transfer_buffer_bytes=buffer_bytes)
    assert window_bytes_of(config, BPT) == window


@pytest.mark.parametrize(("buffer_bytes", "most"), [(40, 4), (120, 4), (121, 5), (160, 5), (1000, 26)])
def test_pieces_that_wait_for_their_engine_fill_the_buffer_with_one_that_comes_and_are_four_always(
    buffer_bytes: int, most: int
) -> None:
    assert most_arriving_of(TransferConfig(transfer_chunk_tokens=4, transfer_buffer_bytes=buffer_bytes), BPT) == most


def test_credit_grows_with_what_has_settled_and_is_said_once() -> None:
    credit = Credit(100)
    assert credit.beyond(0) == Grant(credit_bytes=100)
    assert credit.beyond(0) is None
    assert credit.beyond(1) == Grant(credit_bytes=101)
    assert credit.beyond(0) is None, "it never shrinks"


@pytest.mark.parametrize("make", [lambda size: window_bytes_of(CONFIG, size), lambda s: ExportQueue(CONFIG, bytes_per_token=s)])
def test_a_token_of_no_bytes_is_our_bug(make: object) -> None:
    assert callable(make)
    make(1)
    with pytest.raises(AssertionError, match="is 0"):
        make(0)


def test_a_key_says_nothing_and_is_long() -> None:
    keys = {unguessable_key() for _ in range(10)}
    assert len(keys) == 10
    assert {len(key) for key in keys} == {24}


# --- D


def test_a_failure_of_a_piece_that_was_never_announced_changes_nothing() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p",), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    assert side.on_failed(H, "never announced", "timeout", 0.0) == []
    assert side.on_arrived(H, "never announced", 0.0) == []
    assert (side.snapshot()["late"], stages(side)) == (2, ["accepted"])


def test_bytes_given_up_twice_are_granted_twice() -> None:
    side = decode_side(NEVER)
    side.start(request(16), 0, ("p",), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    assert side.on_reserved("r", 0.0) == [act.Send(H, Grant(credit_bytes=160))]
    for key, begin in (("a", 0), ("b", 4)):
        side.on_message(H, ready(key, begin, begin + 4), 0.0)
    granted = []
    for key in ("a", "b"):
        granted += side.on_failed(H, key, "unknown_key", 0.0)
    messages = [action.message for action in granted if isinstance(action, act.Send)]
    assert [message for message in messages if isinstance(message, Grant)] == [Grant(credit_bytes=200), Grant(credit_bytes=240)]


def test_another_backend_gets_as_long_to_begin_as_the_first_had() -> None:
    side = decode_side(NEVER)
    side.start(request(4), 0, ("p",), 0.0)
    side.on_message(H, Agreed(backends=("fake", "spare")), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    side.on_message(H, ready("a", 0, 4), 0.0)
    side.on_message(H, Done(first=FIRST, num_chunks=1), 0.0)
    side.on_failed(H, "a", "timeout", 15.0)
    side.on_failed(H, "a", "timeout", 15.0)
    assert side.tick(24.9) == [], "a lease of silence begins with the change"
    assert only(act.Recovered, side.tick(25.0)).rung == "reconnect"


def test_every_overdue_fetch_of_a_stream_is_tried_again_in_one_tick() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p",), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    for key, begin, end in (("a", 0, 4), ("b", 4, 8)):
        side.on_message(H, ready(key, begin, end), 0.0)
    notes = [action for action in side.tick(6.0) if isinstance(action, act.Recovered)]
    assert notes == [
        act.Recovered("refetch", "r", "p", "transferring", f"fetch of {span} over fake: timeout")
        for span in ("[0, 4)", "[4, 8)")
    ]


def test_a_rung_names_the_request_the_peer_that_failed_and_why() -> None:
    side = decode_side()
    side.start(request(), 0, ("p",), 0.0)
    first = only(act.Recovered, side.on_message(H, StreamEnded(reason="dead", error=Unavailable("reset by peer")), 0.0))
    assert first == act.Recovered("reconnect", "r", "p", "opening", "dead: reset by peer")
    side.tick(0.1)
    last = only(act.Recovered, side.on_message(HandoffId("r", 2), StreamEnded(reason="heartbeat"), 0.2))
    assert last == act.Recovered("local_prefill", "r", "p", "opening", "heartbeat")


def test_a_stream_that_ends_for_want_of_room_is_opened_again_after_a_pause() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p", "q"), 0.0)
    full = StreamEnded(reason="closed", error=Overloaded("too many streams"))
    opened = only(act.OpenStream, side.on_message(H, full, 50.0))
    assert opened.peer == "q"
    side.on_message(H2, LEFT, 50.0)
    assert none_of(act.Recovered, side.tick(59.9)), "its ten seconds to answer begin now"
    assert only(act.Recovered, side.tick(60.0)).cause == "no answer for 10 s"


def test_too_late_says_where_the_request_was() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p",), 0.0)
    text = "request r: deadline passed in the hand-off at stage"
    assert only(act.Fail, side.tick(100.0)).error.message == f"{text} opening with p"
    side.start(request(), 0, ("p",), 0.0)
    side.on_message(HandoffId("r", 2), StreamEnded(reason="dead"), 99.95)
    assert only(act.Fail, side.tick(100.0)).error.message == f"{text} waiting without a prefill worker"


# --- P


def test_a_publication_that_fails_after_its_piece_was_discarded_changes_nothing() -> None:
    side = prefill_side()
    side.open(H, Open(request=request(), held_tokens=0, backend="fake"), 0.0)
    side.on_admitted(H, 0)
    side.on_message(H, Grant(credit_bytes=10_000), 0.0)
    side.on_computed("r#1", 10)
    side.on_message(H, Ack(key="k0"), 0.0)
    assert side.on_publish_failed(H, "k0", "device") == []
    assert side.on_published(H, ready("k0", 0, 4), 0.0) == [act.Discard("k0")]
    assert (side.snapshot()["late"], side._exports.buffered_bytes) == (2, 60)


def test_parking_is_told_to_the_stream_it_concerns() -> None:
    side = prefill_side()
    side.open(H, Open(request=request(), held_tokens=0, backend="fake"), 0.0)
    side.on_admitted(H, 0)
    side.on_first_token("r#1", FIRST)
    assert side.on_parked("r#1") == [act.Reply(H, Parked())]


def test_a_range_under_another_key_is_not_the_same_piece() -> None:
    record = Outbound(H, request(), 0, 0.0, 4)
    record.pieces["a"] = OutgoingPiece(0, 4, 40, 4)
    assert (record.key_of(0, 4), record.key_of(0, 3), record.key_of(1, 4)) == ("a", None, None)


# --- the mirror


def test_a_borrowing_says_why_it_ended() -> None:
    def begun() -> Borrower:
        side = Borrower(CONFIG, bytes_per_token=BPT)
        side.start(H, "r#1", LENDING, (2, 11), 100.0)
        side.on_reserved("r#1", 5.0)
        side.on_message(H, ready("a", 2, 6), 5.0)
        return side

    ends = [
        begun().on_message(H, Declined(reason="no more"), 5.0),
        begun().on_message(H, ready("b", 5, 7), 5.0),
        begun().on_message(H, ready("b", 6, 6), 5.0),
        begun().on_failed(H, "a", "unknown_key"),
        begun().tick(6.25),
    ]
    assert [only(Borrowed, actions).cause for actions in ends] == [
        "no more",
        "piece [5, 7) of group 0 was announced before",
        "piece [6, 6) of group 0: wanted at most 4 tokens of [2, 11) of group 0",
        "fetch of [2, 6): unknown_key",
        "no piece for 1.2 s",
    ]
    assert act.Reply(H, Ack(key="b")) in ends[1], "what makes no sense is acknowledged, so that D frees it"


def test_a_borrowing_that_is_complete_has_no_cause() -> None:
    side = Borrower(CONFIG, bytes_per_token=BPT)
    side.start(H, "r#1", LENDING, (2, 4), 100.0)
    side.on_reserved("r#1", 5.0)
    side.on_message(H, ready("a", 2, 4), 5.0)
    last = only(Borrowed, side.on_arrived(H, "a", 5.0))
    assert last == Borrowed(H, "r#1", 4, 2, 20, Outcome.COMPLETE, "", LENDING.address, announced=True)


def test_a_borrowing_of_nothing_is_our_bug() -> None:
    side = Borrower(CONFIG, bytes_per_token=BPT)
    with pytest.raises(AssertionError, match=r"nothing to borrow in \[3, 3\)"):
        side.start(H, "r#1", LENDING, (3, 3), 100.0)


def test_borrowings_end_one_by_one_and_unknown_pieces_concern_none() -> None:
    side = Borrower(CONFIG, bytes_per_token=BPT)
    for handoff, name in ((H, "r#1"), (OTHER, "other#2")):
        side.start(handoff, name, LENDING, (2, 11), 100.0)
        side.on_reserved(name, 5.0)
    assert side.on_failed(H, "unheard of", "timeout") == []
    assert side.on_arrived(H, "unheard of", 5.0) == []
    ended = [action.handoff for action in side.tick(6.0) if isinstance(action, Borrowed)]
    assert ended == [H, OTHER], "both stand still"


def test_credit_of_a_borrowing_is_not_said_again_before_something_arrived() -> None:
    side = Borrower(replace(CONFIG, transfer_buffer_bytes=80), bytes_per_token=BPT)
    side.start(H, "r#1", LENDING, (0, 12), 100.0)
    assert side.on_reserved("r#1", 5.0)[1:] == [act.Reply(H, Grant(credit_bytes=80))]
    side.on_message(H, ready("a", 0, 4), 5.0)
    assert side.on_arrived(H, "a", 5.0)[2:] == [act.Reply(H, Grant(credit_bytes=120))]


def lending(held: int = 11, buffer_bytes: int = 1000) -> Lender:
    names = iter(f"k{number}" for number in range(100))
    side = Lender(replace(CONFIG, transfer_buffer_bytes=buffer_bytes), bytes_per_token=BPT, new_key=lambda: next(names))
    side.open(H, held)
    return side


def test_a_piece_that_is_published_after_its_acknowledgement_is_discarded_and_the_loan_goes_on() -> None:
    side = lending()
    side.on_message(H, Want(begin=2, end=11, reason="held"), 1.0)
    side.on_message(H, Grant(credit_bytes=80), 1.0)
    side.on_message(H, Ack(key="k0"), 1.0)
    assert side.on_published(H, ready("k0", 2, 6), 1.0) == [act.Discard("k0")]
    assert side.num_loans == 1


def test_what_is_declined_is_declined_to_who_wanted_it_and_says_why() -> None:
    side = lending()
    assert side.on_message(H, Want(begin=2, end=12, reason="held"), 1.0) == [
        act.Send(H, Declined(reason="Want [2, 12) of group 0: [0, 11) of group 0 is lent, once at a time"))
    ]


def test_the_lease_of_a_loan_begins_with_the_want() -> None:
    side = lending()
    side.on_message(H, Want(begin=2, end=11, reason="held"), 90.0)
    assert side.tick(90.0 + CONFIG.lease_s - 0.1) == []
    assert only(act.Send, side.tick(90.0 + CONFIG.lease_s)).message == Declined(
        reason=f"not fetched for {CONFIG.lease_s:.1f} s"
    )


def test_credit_that_came_before_the_want_is_lost_and_the_next_grant_says_it_all() -> None:
    side = lending()
    assert side.on_message(H, Grant(credit_bytes=1000), 1.0) == []
    assert side.on_message(H, Want(begin=0, end=4, reason="held"), 1.0) == []
    assert side.on_message(H, Grant(credit_bytes=1000), 1.0) == [act.Export(H, "r", 0, 4, "k0")]
