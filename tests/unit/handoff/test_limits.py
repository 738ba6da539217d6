"""Time and order: several hand-offs at their limit in one tick, and what comes before there are pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.errors import DeadlineExceeded, HandoffLost
from jdisagg.handoff import actions as act
from jdisagg.handoff.borrower import Borrowed, Borrower
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.lender import Lender
from jdisagg.handoff.line import SLOWEST_BYTES_PER_S
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
    Refused,
    Started,
    StreamEnded,
    Want,
)
from jdisagg.handoff.prefill_side import PrefillSide
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

OTHER = HandoffId("other", 2)


def publishing(side: PrefillSide, handoff: HandoffId, now_s: float) -> None:
    """One piece, [0, 4), was published at `now_s`."""
    opening = Open(request=request(request_id=handoff.request_id), held_tokens=0, backend="fake")
    side.open(handoff, opening, now_s)
    side.on_admitted(handoff, 0)
    side.on_message(handoff, Grant(credit_bytes=40), now_s)
    export = only(act.Export, side.on_computed(f"{handoff.request_id}#{handoff.serial}", 4))
    side.on_published(handoff, ready(export.key, 0, 4), now_s)


def refusals(actions: list[act.PrefillAction]) -> list[str]:
    """What is said to whom, and as which error."""
    replies = [action for action in actions if isinstance(action, act.Reply) and isinstance(action.message, Refused)]
    return [f"{reply.handoff.request_id}: {type(reply.message.error).__name__}: {reply.message.error}" for reply in replies]  # type: ignore[union-attr]


def test_every_lease_that_is_over_ends_its_hand_off_in_one_tick() -> None:
    side = prefill_side()
    publishing(side, H, 0.0)
    publishing(side, OTHER, 0.5)
    assert refusals(side.tick(CONFIG.lease_s + 0.5)) == [
        f"r: {HandoffLost.__name__}: request r: published pieces not fetched for 10.5 s",
        f"other: {HandoffLost.__name__}: request other: published pieces not fetched for 10.0 s",
    ]
    assert side.is_idle


def test_every_deadline_that_has_passed_ends_its_hand_off_in_one_tick_and_says_how_far_it_was() -> None:
    side = prefill_side()
    publishing(side, H, 95.0)
    publishing(side, OTHER, 95.0)
    side.on_first_token("other#2", FIRST)
    passed = "deadline passed on the prefill side at stage"
    assert refusals(side.tick(100.0)) == [
        f"r: {DeadlineExceeded.__name__}: request r: {passed} computing, 4 of 10 tokens computed",
        f"other: {DeadlineExceeded.__name__}: request other: {passed} computed, 10 of 10 tokens computed",
    ]
    assert side.is_idle


def test_every_loan_that_nobody_fetches_is_taken_back_in_one_tick() -> None:
    side = Lender(CONFIG, bytes_per_token=BPT)
    for handoff, now_s in ((H, 1.0), (OTHER, 1.5)):
        side.open(handoff, 8)
        side.on_message(handoff, Want(begin=0, end=8, reason="held"), now_s)
    assert side.tick(11.5) == [
        act.Send(H, Declined(reason="not fetched for 10.5 s")),
        act.Send(OTHER, Declined(reason="not fetched for 10.0 s")),
    ]


def test_a_publication_that_comes_after_the_ack_of_its_piece_is_discarded_while_the_hand_off_goes_on() -> None:
    side = prefill_side()
    publishing(side, H, 0.0)
    side.on_message(H, Ack(key="k0"), 0.0)
    assert side.on_published(H, ready("k0", 0, 4), 0.0) == [act.Discard("k0")]
    assert stages(side) == ["computing"]


def test_a_fetch_has_the_time_that_its_bytes_and_those_before_it_take_on_a_slow_network() -> None:
    side = decode_side(NEVER)
    side.start(request(8), 0, ("p",), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    big = 60 * 2**20
    times_s = [
        action.deadline_s
        for key, begin in (("a", 0), ("b", 4))
        for action in side.on_message(H, replace(ready(key, begin, begin + 4), num_bytes=big), 1.0)
        if isinstance(action, act.Fetch)
    ]
    assert times_s == [1.0 + 7.5, 1.0 + 15.0]  # at 8 MiB a second


def two_requests_fetch(side: DecodeSide, peers: tuple[str, str]) -> list[float]:
    """The time that each gets for a piece of 60 MiB."""
    times_s = []
    for number, (name, peer) in enumerate(zip("rs", peers, strict=True), start=1):
        handoff = HandoffId(name, number)
        side.start(request(4, request_id=name), 0, (peer,), 0.0)
        side.on_message(handoff, Accepted(cached_tokens=0), 0.0)
        side.on_reserved(name, 0.0)
        piece = replace(ready(f"{name}-a", 0, 4), num_bytes=60 * 2**20)
        times_s.append(only(act.Fetch, side.on_message(handoff, piece, 0.0)).deadline_s)
    return times_s


def test_a_fetch_has_the_time_of_other_requests_pieces_that_come_from_the_same_peer_before_its_own() -> None:
    side = decode_side(NEVER)
    assert two_requests_fetch(side, ("p", "q")) == [7.5, 7.5]
    assert two_requests_fetch(decode_side(NEVER), ("p", "p")) == [7.5, 15.0]


@pytest.mark.parametrize("ends", ["arrives", "fails", "cancelled", "lost"])
def test_a_piece_that_is_fetched_no_more_takes_no_time_from_others(ends: str) -> None:
    side = decode_side(NEVER)
    two_requests_fetch(side, ("p", "p"))
    match ends:
        case "arrives":
            side.on_arrived(HandoffId("r", 1), "r-a", 1.0)
        case "fails":
            for _ in range(2):
                side.on_failed(HandoffId("r", 1), "r-a", "checksum", 1.0)
        case "cancelled":
            side.release("r")
        case _:
            side.on_message(HandoffId("r", 1), StreamEnded(reason="dead"), 1.0)
    again = side.on_failed(HandoffId("s", 2), "s-a", "connection", 1.0)
    assert only(act.Fetch, again).deadline_s == 1.0 + 7.5


def test_who_waits_for_a_turn_is_not_lost_while_pieces_of_others_come_from_the_same_peer() -> None:
    """Of two computed prompts one has all turns, slowly; when its pieces end, too, the other one is not waited for for ever."""
    side, names = decode_side(NEVER), ("r", "s")
    for number, name in enumerate(names, start=1):
        side.start(request(request_id=name, deadline_s=1000.0), 0, ("p",), 0.0)
        side.on_message(HandoffId(name, number), Accepted(cached_tokens=0), 0.0)
        side.on_reserved(name, 0.0)
        side.on_message(HandoffId(name, number), Done(first=replace(FIRST, request_id=name), num_chunks=3), 0.0)
    for now_s, key, begin in ((9.0, "a", 0), (18.0, "b", 4)):
        side.on_message(HandoffId("r", 1), ready(key, begin, begin + 4), now_s)
        side.on_arrived(HandoffId("r", 1), key, now_s)
        assert side.tick(now_s + 9.9) == []
    lost = [action for action in side.tick(28.0) if isinstance(action, act.Recovered)]
    assert [(action.request_id, action.rung) for action in lost] == [("r", "reconnect"), ("s", "reconnect")]


def test_who_waits_for_a_turn_is_not_lost_while_a_big_piece_of_another_one_comes_slowly_from_the_same_peer() -> None:
    side, names = decode_side(NEVER), ("r", "s")
    for number, name in enumerate(names, start=1):
        side.start(request(4, request_id=name, deadline_s=1000.0), 0, ("p",), 0.0)
        side.on_message(HandoffId(name, number), Accepted(cached_tokens=0), 0.0)
        side.on_reserved(name, 0.0)
        side.on_message(HandoffId(name, number), Done(first=replace(FIRST, request_id=name), num_chunks=1), 0.0)
    side.on_message(HandoffId("r", 1), replace(ready("a", 0, 4), num_bytes=20 * SLOWEST_BYTES_PER_S), 0.0)
    assert side.tick(20.0) == [], "it takes twenty seconds"
    side.on_arrived(HandoffId("r", 1), "a", 20.0)
    assert side.tick(29.9) == []
    assert only(act.Recovered, side.tick(30.0)).request_id == "s"


def test_pieces_that_are_announced_before_there_are_pages_are_fetched_when_there_are() -> None:
    side = decode_side(NEVER)
    side.start(request(8), 0, ("p",), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    for key, begin in (("a", 0), ("b", 4)):
        assert side.on_message(H, ready(key, begin, begin + 4), 1.0) == []
    assert side.tick(50.0) == [], "no fetch is overdue: none was begun"
    fetches = [action for action in side.on_reserved("r", 50.0) if isinstance(action, act.Fetch)]
    assert [(fetch.ready.key, fetch.peer, fetch.deadline_s) for fetch in fetches] == [("a", "p", 55.0), ("b", "p", 55.0)]
    assert none_of(act.Recovered, side.tick(55.9))
    assert {action.rung for action in side.tick(56.0) if isinstance(action, act.Recovered)} == {"refetch"}


def test_a_piece_of_an_older_worker_comes_over_the_backend_that_was_agreed() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p",), 0.0)
    side.on_message(H, Agreed(backends=("spare", "fake")), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    assert only(act.Fetch, side.on_message(H, ready("a", 0, 4, backend=""), 0.0)).ready == ready("a", 0, 4, backend="spare")
    assert only(act.Fetch, side.on_message(H, ready("b", 4, 8, backend="fake"), 0.0)).ready.backend == "fake"


def test_credit_that_would_not_grow_is_not_sent() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p",), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    assert only(act.Send, side.on_reserved("r", 0.0)).message == Grant(credit_bytes=160)
    side.on_message(H, replace(ready("a", 0, 4), num_bytes=0), 0.0)
    assert side.on_arrived(H, "a", 0.0) == [act.Import("r", H, "a"), act.Send(H, Ack(key="a"))]


@pytest.mark.parametrize(
    ("piece", "complaint"),
    [
        (ready("x", 2, 5), "piece [2, 5) lies outside [3, 10)"),
        (ready("x", 3, 8), "piece [3, 8) is longer than --transfer-chunk-tokens 4"),
        (ready("x", 4, 6), "piece [4, 6) was announced before"),
        (replace(ready("x", 3, 5), num_bytes=-1), "piece [3, 5) is announced with -1 bytes"),
        (replace(ready("x", 3, 5), num_bytes=2**62), f"piece [3, 5) is announced with {2**62} bytes"),
    ],
)
def test_a_piece_that_makes_no_sense_is_named_and_its_stream_replaced_at_once(piece: object, complaint: str) -> None:
    side = decode_side(NEVER)
    side.start(request(), 3, ("p", "q"), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_message(H, ready("ok", 5, 7), 0.0)
    lost = side.on_message(H, piece, 20.0)  # type: ignore[arg-type]
    assert only(act.Recovered, lost).cause == f"protocol: {complaint}"
    side.on_message(H2, LEFT, 20.0)
    assert side.tick(29.9) == [], "the next worker's ten seconds to answer begin now"
    assert "no answer for 10 s" in only(act.Fail, side.tick(30.0)).error.message


def test_after_a_pause_the_peer_has_ten_seconds_to_answer() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p",), 0.0)
    side.on_message(H, LEFT, 0.0)
    assert only(act.Recovered, side.tick(10.0)).rung == "reconnect"
    assert only(act.OpenStream, side.tick(30.0)).peer == "p"
    side.on_message(H2, LEFT, 30.0)
    assert side.tick(39.9) == []
    assert "no answer for 10 s" in only(act.Fail, side.tick(40.0)).error.message


def test_two_streams_that_stand_still_are_lost_in_one_tick() -> None:
    side = decode_side(NEVER)
    for handoff in (H, OTHER):
        side.start(request(request_id=handoff.request_id), 0, ("p",), 0.0)
        side.on_message(handoff, Accepted(cached_tokens=0), 0.0)
        side.on_reserved(handoff.request_id, 0.0)
        side.on_message(handoff, Done(first=FIRST, num_chunks=3), 0.0)
    notes = [action for action in side.tick(20.25) if isinstance(action, act.Recovered)]
    assert [(note.request_id, note.cause) for note in notes] == [
        (name, "no piece for 20.2 s after the prompt was computed") for name in ("r", "other")
    ]


def test_every_request_that_is_too_late_fails_in_one_tick() -> None:
    side = decode_side(NEVER)
    for name in ("r", "other"):
        side.start(request(request_id=name), 0, ("p",), 0.0)
    assert [action.request_id for action in side.tick(100.0) if isinstance(action, act.Fail)] == ["r", "other"]


def test_a_fetch_that_is_tried_again_counts_as_progress() -> None:
    side = decode_side(NEVER)
    side.start(request(4), 0, ("p",), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    side.on_message(H, ready("a", 0, 4), 0.0)
    side.on_message(H, Done(first=FIRST, num_chunks=1), 0.0)
    side.on_failed(H, "a", "unknown_key", 15.0)  # published again: nothing is on its way until P says so
    assert side.tick(24.9) == []
    assert only(act.Recovered, side.tick(25.0)).rung == "reconnect"


def test_at_p_a_start_is_told_to_its_own_stream_and_an_end_that_both_sides_saw_is_not_late() -> None:
    side = prefill_side()
    publishing(side, H, 0.0)
    assert side.on_started("r#1") == [act.Reply(H, Started())]
    side.release(H)
    assert side.on_message(H, StreamEnded(reason="closed"), 0.0) == []
    assert side.snapshot()["late"] == 0


def test_a_second_open_is_refused_by_name() -> None:
    side = prefill_side()
    publishing(side, H, 0.0)
    again = side.on_message(H, Open(request=request(), held_tokens=0, backend="fake"), 0.0)
    assert refusals(again) == ["r: InvalidRequest: request r: Open twice on one stream"]


def test_a_borrowing_counts_the_bytes_of_all_its_pieces_and_grants_no_more_than_them() -> None:
    side = Borrower(CONFIG, bytes_per_token=BPT)
    side.start(H, "r#1", Lending(address="d0:1", backend="fake", dtype="float32"), (2, 11), 100.0)
    side.on_reserved("r#1", 5.0)
    for key, begin, end in (("a", 2, 6), ("b", 6, 10)):
        side.on_message(H, ready(key, begin, end), 5.0)
        assert only(act.Import, side.on_arrived(H, key, 5.0)).key == key
    side.on_message(H, replace(ready("c", 10, 11), num_bytes=0), 5.0)
    last = side.on_arrived(H, "c", 5.0)
    assert only(Borrowed, last).num_bytes == 80
    empty = Borrower(CONFIG, bytes_per_token=BPT)
    empty.start(H, "r#1", Lending(address="d0:1", backend="fake", dtype="float32"), (2, 11), 100.0)
    empty.on_reserved("r#1", 5.0)
    empty.on_message(H, replace(ready("a", 2, 6), num_bytes=0), 5.0)
    assert empty.on_arrived(H, "a", 5.0) == [act.Import("r#1", H, "a"), act.Reply(H, Ack(key="a"))]
