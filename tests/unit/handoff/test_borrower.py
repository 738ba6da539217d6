"""P borrows what D holds: what is wanted, fetched and kept, and what ends it, without which P would wait for ever."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from jdisagg.handoff import actions as act
from jdisagg.handoff.borrower import LONGEST_S, STALL_S, Borrowed, Borrower, BorrowerAction, Outcome
from jdisagg.handoff.messages import Ack, ChunkReady, Declined, Grant, HandoffId, Want
from tests.unit.handoff.rig import BPT, CONFIG, LENDING, H, none_of, only, ready

OTHER, THIRD = HandoffId("other", 2), HandoffId("third", 3)


def borrower(*, reserved: bool = True) -> Borrower:
    """One that wants [2, 11) of a request whose pages exist."""
    side = Borrower(CONFIG, bytes_per_token=BPT)
    side.start(H, "r#1", LENDING, (2, 11), 100.0)
    if reserved:
        side.on_reserved("r#1", 5.0)
    return side


def ended(actions: list[BorrowerAction]) -> tuple[int, int, Outcome]:
    """Tokens in place and borrowed, and how it ended."""
    last = only(Borrowed, actions)
    return last.held_tokens, last.num_tokens, last.outcome


def test_nothing_is_wanted_before_there_are_pages() -> None:
    side = borrower(reserved=False)
    assert side.tick(50.0) == []
    want, grant = side.on_reserved("r#1", 5.0)
    assert want == act.Reply(H, Want(begin=2, end=11, reason="held", piece_tokens=4))
    assert grant == act.Reply(H, Grant(credit_bytes=1000))
    assert side.on_reserved("r#1", 5.0) == []
    assert side.on_reserved("other", 5.0) == []


def test_pieces_are_fetched_imported_and_acknowledged_and_the_last_ends_it() -> None:
    side = borrower()
    for key, begin, end in (("a", 2, 6), ("b", 6, 10)):
        fetch = only(act.Fetch, side.on_message(H, ready(key, begin, end), 5.1))
        assert (fetch.peer, fetch.deadline_s) == ("d0:1", 5.0 + LONGEST_S)
    assert side.on_message(H, ready("b", 6, 10), 5.1) == [], "said twice"
    assert side.on_arrived(H, "b", 5.2) == [
        act.Import("r#1", H, "b"), act.Reply(H, Ack(key="b")), act.Reply(H, Grant(credit_bytes=1040)),
    ]  # fmt: skip
    assert side.on_arrived(H, "b", 5.2) == [], "arrived twice"
    side.on_message(H, ready("c", 10, 11), 5.3)
    side.on_arrived(H, "c", 5.3)
    assert ended(side.on_arrived(H, "a", 5.4)) == (11, 9, Outcome.COMPLETE)
    assert side.is_idle
    assert side.on_arrived(H, "a", 5.5) == []


def test_what_came_without_a_gap_is_kept_and_the_rest_is_acknowledged_unfetched() -> None:
    side = borrower()
    for key, begin, end in (("a", 2, 6), ("b", 6, 10), ("c", 10, 11)):
        side.on_message(H, ready(key, begin, end), 5.1)
    side.on_arrived(H, "a", 5.2)
    side.on_arrived(H, "c", 5.2)
    actions = side.on_message(H, Declined(reason="gone"), 5.3)
    assert ended(actions) == (6, 5, Outcome.DECLINED)
    assert actions[:2] == [act.CancelFetch(H), act.Reply(H, Ack(key="b"))]
    assert side.on_message(H, ready("d", 6, 8), 5.4) == [act.Reply(H, Ack(key="d"))], "nobody wants it any more"
    assert side.on_message(H, Declined(reason="again"), 5.4) == []


def test_a_piece_is_fetched_twice_at_most() -> None:
    side = borrower()
    side.on_message(H, ready("a", 2, 6), 5.1)
    assert only(act.Fetch, side.on_failed(H, "a", "checksum")).ready.key == "a"
    assert ended(side.on_failed(H, "a", "checksum")) == (2, 0, Outcome.FAILED)
    assert side.on_failed(H, "a", "checksum") == []


def test_a_piece_that_d_does_not_know_is_not_asked_for_again() -> None:
    side = borrower()
    side.on_message(H, ready("a", 2, 6), 5.1)
    assert ended(side.on_failed(H, "a", "unknown_key")) == (2, 0, Outcome.FAILED)


@pytest.mark.parametrize(("begin", "end", "group"), [(0, 4, 0), (2, 7, 0), (9, 12, 0), (5, 8, 0), (6, 10, 1)])
def test_a_piece_that_was_not_wanted_ends_it(begin: int, end: int, group: int) -> None:
    side = borrower()
    side.on_message(H, ready("a", 2, 6), 5.1)
    fields = {name: getattr(ready("b", begin, end), name) for name in ChunkReady.__dataclass_fields__}
    actions = side.on_message(H, ChunkReady(**{**fields, "group": group}), 5.1)
    assert ended(actions)[2] is Outcome.FAILED
    assert {action.message.key for action in actions if isinstance(action, act.Reply)} == {"a", "b"}  # type: ignore[union-attr]


def test_a_piece_over_another_backend_than_was_offered_ends_it() -> None:
    side = borrower()
    actions = side.on_message(H, ready("a", 2, 6, "pigeon"), 5.1)
    assert ended(actions)[2] is Outcome.FAILED
    assert none_of(act.Fetch, actions)


def test_a_piece_that_comes_before_there_are_pages_for_it_ends_it() -> None:
    side = borrower(reserved=False)
    actions = side.on_message(H, ready("a", 2, 6), 4.0)
    assert ended(actions) == (2, 0, Outcome.FAILED)
    assert none_of(act.Fetch, actions), "it would arrive, and there is nowhere to put it"
    assert side.on_reserved("r#1", 5.0) == []


def test_pieces_that_come_too_slowly_are_not_called_none() -> None:
    side = borrower()
    for now_s in (5.9, 5.0 + LONGEST_S - 0.1):
        side.on_message(H, ready(f"a{now_s}", 2 if now_s < 6 else 6, 6 if now_s < 6 else 10), now_s)
    assert only(Borrowed, side.tick(5.0 + LONGEST_S)).cause == "0 of 9 tokens came in time"


def test_it_ends_after_a_second_without_progress() -> None:
    side = borrower()
    assert side.tick(5.0 + STALL_S - 0.01) == []
    side.on_message(H, ready("a", 2, 6), 5.9)
    assert side.tick(5.9 + STALL_S - 0.01) == []
    side.on_arrived(H, "a", 6.8)
    assert side.tick(6.8 + STALL_S - 0.01) == []
    assert ended(side.tick(6.8 + STALL_S)) == (6, 4, Outcome.STALLED)


def test_time_in_which_p_stood_still_itself_ends_nothing() -> None:
    side = borrower()
    side.on_message(H, ready("a", 2, 6), 5.5)
    assert side.tick(5.6) == []
    assert side.tick(9.6) == []
    assert side.tick(9.6 + STALL_S - 0.2) == []
    assert ended(side.tick(9.6 + STALL_S)) == (2, 0, Outcome.STALLED), "a tenth of a second had passed before"


@pytest.mark.parametrize("deadline_s", [8.0, 100.0])
def test_it_ends_after_a_while_whatever_comes(deadline_s: float) -> None:
    side = Borrower(CONFIG, bytes_per_token=BPT)
    side.start(H, "r#1", LENDING, (2, 100), deadline_s)
    side.on_reserved("r#1", 5.0)
    last_s = min(deadline_s, 5.0 + LONGEST_S)
    for number in itertools.count():
        now_s = 5.0 + 0.9 * number
        if now_s >= last_s:
            break
        assert side.tick(now_s) == []
        side.on_message(H, ready(f"k{number}", 2 + number, 3 + number), now_s)
        side.on_arrived(H, f"k{number}", now_s)
    assert ended(side.tick(last_s))[2] is Outcome.STALLED


@pytest.mark.parametrize(
    ("reason", "no_kv"),
    [("connection", True), ("unreachable", True), ("stalled", True)]
    + [(reason, False) for reason in ("unknown_key", "checksum", "truncated", "slow", "device", "timeout")],
)
def test_no_kv_comes_from_a_d_that_is_not_reached_and_other_failures_say_nothing_of_the_next_prompt(
    reason: str, no_kv: bool
) -> None:
    """Where D took a piece back, as its client went away, or P could not place it, it was reached; and where the time was over
    that was the client's."""
    side = borrower()
    side.on_message(H, ready("a", 2, 6), 5.1)
    actions = side.on_failed(H, "a", reason)
    last = only(Borrowed, actions if reason == "unknown_key" else side.on_failed(H, "a", reason))
    assert (last.no_kv, last.announced) == (no_kv, True)


@pytest.mark.parametrize(
    ("reason", "in_time", "too_late"),
    [("timeout", False, False), ("slow", False, False), ("unknown_key", True, False), ("checksum", True, True)],
)
def test_a_fetch_that_ends_with_its_request_s_time_is_no_failure_of_the_transfer(
    reason: str, in_time: bool, too_late: bool
) -> None:
    """A timeout may be heard of a moment before the clock says so: it is of this fetch, which had as long as the request."""
    side = Borrower(CONFIG, bytes_per_token=BPT)
    side.start(H, "r#1", LENDING, (2, 11), 6.0)
    side.on_reserved("r#1", 5.0)
    side.on_message(H, ready("a", 2, 6), 5.1)
    assert [side.is_failure(H, "a", reason, now_s) for now_s in (5.9, 6.0)] == [in_time, too_late]
    side.release(H)
    assert side.is_failure(H, "a", reason, 5.9) == too_late, "nobody waits for it any more"


@pytest.mark.parametrize("reason", ["timeout", "slow"])
def test_what_comes_early_of_a_hurried_fetch_is_of_an_earlier_one_and_a_failure(reason: str) -> None:
    side = Borrower(CONFIG, bytes_per_token=BPT)
    side.start(H, "r#1", LENDING, (2, 11), 6.0)
    side.on_reserved("r#1", 5.0)
    side.on_message(H, ready("a", 2, 6), 5.1)
    assert side.is_failure(H, "a", reason, 5.5)


@pytest.mark.parametrize("reason", ["timeout", "slow", "unknown_key", "checksum"])
def test_a_fetch_of_a_request_that_has_time_is_a_failure_when_it_fails(reason: str) -> None:
    side = borrower()
    side.on_message(H, ready("a", 2, 6), 5.1)
    assert side.is_failure(H, "a", reason, 5.0 + LONGEST_S)


def test_kv_that_waits_behind_that_of_other_prompts_does_not_stay_away() -> None:
    """Pieces of one D come one after the other."""
    side = borrower()
    side.start(OTHER, "other#2", LENDING, (2, 11), 100.0)
    side.on_reserved("other#2", 5.0)
    for handoff, key in ((H, "a"), (OTHER, "b")):
        side.on_message(handoff, ready(key, 2, 6), 5.0)
    side.on_arrived(H, "a", 5.2)
    side.start(THIRD, "third#3", replace(LENDING, address="d1:1"), (2, 11), 100.0)
    side.on_reserved("third#3", 5.3)
    side.on_message(THIRD, ready("t", 2, 6), 5.3)
    side.on_arrived(THIRD, "t", 5.4)
    side.on_message(H, ready("a2", 6, 10), 5.8)
    side.release(THIRD)
    (last,) = (action for action in side.tick(6.0) if isinstance(action, Borrowed))
    assert (last.handoff, last.outcome, last.num_tokens, last.no_kv) == (OTHER, Outcome.STALLED, 0, False)
    side.start(OTHER, "other#2", replace(LENDING, address="d1:1"), (2, 11), 100.0)
    side.on_reserved("other#2", 6.0)
    side.on_arrived(H, "a2", 6.7)
    assert side.tick(6.9) == []
    assert only(Borrowed, side.tick(7.0)).no_kv, "of another D nothing came"


def test_one_that_stands_still_and_one_whose_time_is_over_end_at_once() -> None:
    side = borrower()
    side.start(OTHER, "other#2", LENDING, (2, 11), 6.0)
    side.on_reserved("other#2", 5.0)
    side.on_message(OTHER, ready("a", 2, 3), 5.9)
    stalled, late = (action for action in side.tick(5.0 + STALL_S) if isinstance(action, Borrowed))
    assert (stalled.handoff, stalled.cause, stalled.announced) == (H, "no piece for 1.0 s", False)
    assert (late.handoff, late.cause, late.announced) == (OTHER, "0 of 9 tokens came in time", True)


def test_of_a_d_that_published_nothing_no_kv_comes_either() -> None:
    last = only(Borrowed, borrower().tick(5.0 + STALL_S))
    assert (last.no_kv, last.announced) == (True, False)


def test_the_end_of_the_handoff_ends_it_without_a_word() -> None:
    side = borrower()
    assert side.release(H) == [act.CancelFetch(H)]
    assert side.release(H) == []
    assert side.is_idle
    assert side.on_reserved("r#1", 6.0) == []
