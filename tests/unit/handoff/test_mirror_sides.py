"""Lender and Borrower: one by one, and against each other under loss, death and delay."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from jdisagg.core.config import TransferConfig
from jdisagg.handoff import actions as act
from jdisagg.handoff.borrower import LONGEST_S, STALL_S, Borrowed, Borrower, BorrowerAction, Outcome
from jdisagg.handoff.lender import Lender
from jdisagg.handoff.messages import Ack, ChunkReady, Declined, Grant, HandoffId, Lending, Open, Want
from tests.unit.handoff.rig import BPT, CONFIG, H, none_of, only, prefill_side, ready, request
from tests.unit.handoff.test_both_sides import DEADLINE_S, HandoffMachine, config
from tests.unit.handoff.world import World

LENDING = Lending(address="d0:1", backend="fake", dtype="float32")
WANT = Want(begin=2, end=11, reason="held")


# --- P


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
    assert only(Borrowed, side.tick(5.0 + LONGEST_S)).cause == "pieces come, but too slowly"


def test_it_ends_after_a_second_without_progress() -> None:
    side = borrower()
    assert side.tick(5.0 + STALL_S - 0.01) == []
    side.on_message(H, ready("a", 2, 6), 5.9)
    assert side.tick(5.9 + STALL_S - 0.01) == []
    side.on_arrived(H, "a", 6.8)
    assert side.tick(6.8 + STALL_S - 0.01) == []
    assert ended(side.tick(6.8 + STALL_S)) == (6, 4, Outcome.STALLED)


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


def test_the_end_of_the_handoff_ends_it_without_a_word() -> None:
    side = borrower()
    assert side.release(H) == [act.CancelFetch(H)]
    assert side.release(H) == []
    assert side.is_idle
    assert side.on_reserved("r#1", 6.0) == []


# --- D


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
    assert side.buffered_bytes == 80
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
    assert (side.num_loans, side.buffered_bytes, side.is_idle) == (0, 0, False)
    assert side.on_published(H, ready("k1", 6, 10), 1.3) == [act.Discard("k1")], "too late"
    assert side.on_message(H, Ack(key="k1"), 1.3) == []
    side.release(H)
    assert side.is_idle


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


def test_the_end_of_the_stream_frees_everything_and_makes_room_for_others() -> None:
    other = HandoffId("s", 2)
    side = lender(settings=TransferConfig(transfer_chunk_tokens=4, transfer_buffer_bytes=40))
    side.open(other, 6)
    side.on_message(H, WANT, 1.0)
    side.on_message(other, Want(begin=0, end=6, reason="held"), 1.0)
    assert spans(side.on_message(H, Grant(credit_bytes=1000), 1.0)) == [(2, 6)]
    assert spans(side.on_message(other, Grant(credit_bytes=1000), 1.0)) == [], "the buffer is full"
    actions = side.release(H)
    assert actions[0] == act.Discard("k0")
    assert spans(actions) == [(0, 4)]
    assert side.release(H) == []
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


# --- an older peer, and both together


def test_an_older_receiver_which_offers_nothing_is_not_asked() -> None:
    admit = only(act.Admit, prefill_side().open(H, Open(request=request(), held_tokens=4, backend="fake"), 0.0))
    assert (admit.held_tokens, admit.lending) == (4, None)
    message = Open(request=request(), held_tokens=4, backend="fake", lending=LENDING)
    assert only(act.Admit, prefill_side().open(H, message, 0.0)).lending == LENDING


def test_messages_of_the_mirror_change_nothing_in_the_hand_off_itself() -> None:
    side = prefill_side()
    side.open(H, Open(request=request(), held_tokens=4, backend="fake", lending=LENDING), 0.0)
    side.on_admitted(H, 0)
    assert side.on_message(H, ready("d", 0, 4), 1.0) == []
    assert none_of(act.Reply, side.on_message(H, Declined(reason="no"), 1.0))


class MirrorMachine(RuleBasedStateMachine):
    """Streams that borrow: loss, repetition, death and delay of what concerns the mirror; the rest happens by itself."""

    @initialize(buffer_bytes=st.sampled_from([30, 40, 80, 1000]), count=st.integers(1, 3))
    def begin(self, buffer_bytes: int, count: int) -> None:
        self.world = World(config(buffer_bytes=buffer_bytes))
        self.world.borrow_always = True
        for _ in range(count):
            self.start(tokens=13, held=12)

    @rule(tokens=st.integers(3, 13), held=st.integers(2, 13))
    def start(self, tokens: int, held: int) -> None:
        name = f"r{len(self.world.clients)}"
        self.world.start(request(tokens, 9, self.world.now_s + DEADLINE_S, name), min(held, tokens), ("p0", "p1"))
        self.world.reserve(name)

    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        """Messages, and pages at P."""
        for _ in range(count):
            for stream in list(self.world.streams.values()):
                if stream.down:
                    self.world.deliver_down(stream)
                if stream.up:
                    self.world.deliver_up(stream)
            for peer, worker in self.world.prefillers.items():
                for engine_id in worker.unreserved:
                    self.world.reserve_at_prefill(peer, engine_id)

    @rule(data=st.data(), up=st.booleans())
    def lose(self, data: st.DataObject, up: bool) -> None:
        """One message of the mirror."""
        for stream in self.world.streams.values():
            messages = stream.up if up else stream.down
            if messages and isinstance(messages[0], ChunkReady | Declined | Want | Grant | Ack) and data.draw(st.booleans()):
                messages.popleft()
                return

    @rule(outcome=st.sampled_from(["ok", "ok", "ok", "fail", "lost"]))
    def publish(self, outcome: str) -> None:
        if self.world.lending:
            self.world.publish_lent(outcome)

    @rule(data=st.data(), outcome=st.sampled_from(["ok", "ok", "ok", "again", "lost", "checksum", "connection"]))
    def fetch(self, data: st.DataObject, outcome: str) -> None:
        if self.world.loans:
            fetch = data.draw(st.sampled_from(self.world.loans))
            self.world.finish_loan(self.world.streams[fetch.handoff].peer, fetch, outcome)

    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        self.world.kill(data.draw(st.sampled_from(list(self.world.streams.values()))))

    @rule(peer=st.sampled_from(["p0", "p1"]))
    def restart(self, peer: str) -> None:
        self.world.restart(peer)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.release(data.draw(st.sampled_from(list(self.world.clients))))

    @rule(seconds=st.sampled_from([0.0, 0.4, 1.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            HandoffMachine.teardown(self)  # type: ignore[arg-type]


TestMirrorMachine = pytest.mark.covers("I-3", "C10")(MirrorMachine.TestCase)
