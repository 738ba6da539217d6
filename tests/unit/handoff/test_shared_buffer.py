"""A prefill worker's buffer between its receivers: who takes nothing, or too slowly, keeps no other from its pieces."""

from __future__ import annotations

import itertools

import pytest

from jdisagg.core.config import TransferConfig
from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import Ack, Grant, HandoffId, Open, Refused
from jdisagg.handoff.prefill_side import PrefillSide
from tests.unit.handoff.rig import BPT, exports, prefill_side, ready, request

PIECE_TOKENS = 4


class Prefill:
    """Prompts of ten pieces, all computed, whose decode workers have granted credit for everything."""

    def __init__(self, num_pieces_of_room: int, bytes_per_token: int = BPT) -> None:
        room = num_pieces_of_room * PIECE_TOKENS * bytes_per_token
        config = TransferConfig(transfer_chunk_tokens=PIECE_TOKENS, transfer_buffer_bytes=room)
        keys = itertools.count()
        self.side = PrefillSide(config, bytes_per_token=bytes_per_token, new_key=lambda: f"k{next(keys)}")
        self.out: list[tuple[str, HandoffId, str]] = []  # receiver, hand-off, key of pieces that were not acknowledged
        self.receivers: dict[HandoffId, str] = {}
        self.now_s = 0.0

    def opened(self, receiver: str, number: int) -> HandoffId:
        handoff = HandoffId(f"{receiver}-{number}", 1)
        self.receivers[handoff] = receiver
        asked = request(10 * PIECE_TOKENS, request_id=handoff.request_id)
        self.side.open(handoff, Open(request=asked, held_tokens=0, backend="fake"), 0.0, receiver)
        self.side.on_admitted(handoff, 0)
        self.side.on_message(handoff, Grant(credit_bytes=2**40), 0.0)
        self.note(self.side.on_computed(f"{handoff.request_id}#1", 10 * PIECE_TOKENS))
        return handoff

    def acknowledge(self, receiver: str, now_s: float = 0.0) -> None:
        """The oldest piece of a receiver."""
        entry = next(entry for entry in self.out if entry[0] == receiver)
        self.out.remove(entry)
        self.note(self.side.on_message(entry[1], Ack(key=entry[2]), now_s))

    def note(self, actions: list[act.PrefillAction]) -> None:
        exports = [action for action in actions if isinstance(action, act.Export)]
        self.out += [(self.receivers[export.handoff], export.handoff, export.key) for export in exports]

    @property
    def shares(self) -> dict[str, int]:
        receivers = [receiver for receiver, _, _ in self.out]
        return {receiver: receivers.count(receiver) for receiver in receivers}


def test_a_receiver_that_takes_nothing_leaves_room_for_others_however_many_prompts_it_has() -> None:
    prefill = Prefill(num_pieces_of_room=8)
    for number in range(20):
        prefill.opened("stands-still", number)
    assert prefill.shares == {"stands-still": 4}
    prefill.opened("takes", 0)
    assert prefill.shares == {"stands-still": 4, "takes": 2}
    for _ in range(8):
        prefill.acknowledge("takes")
    assert prefill.shares == {"stands-still": 4, "takes": 2}  # the ninth and the tenth piece
    prefill.opened("comes-late", 0)
    assert prefill.shares["comes-late"] == 2


def test_receivers_take_turns_not_their_prompts() -> None:
    prefill = Prefill(num_pieces_of_room=6)
    for number in range(5):
        prefill.opened("many", number)
    prefill.opened("one", 0)
    assert prefill.shares == {"many": 3, "one": 2}
    for _ in range(4):
        prefill.acknowledge("many")
        prefill.acknowledge("one")
    assert prefill.shares["one"] >= 2


def test_small_pieces_on_the_device_fill_the_buffer_as_whole_chunks_do() -> None:
    side = prefill_side(TransferConfig(transfer_chunk_tokens=PIECE_TOKENS, transfer_buffer_bytes=3 * PIECE_TOKENS * BPT))
    handoff = HandoffId("r", 1)
    side.open(handoff, Open(request=request(10), held_tokens=0, backend="fake", max_piece_tokens=1), 0.0, "takes-small-ones")
    side.on_admitted(handoff, 0)
    side.on_message(handoff, Grant(credit_bytes=10 * BPT), 0.0)
    assert exports(side.on_computed("r#1", 10)) == [(0, 1), (1, 2), (2, 3)]
    assert exports(side.on_published(handoff, ready("k0", 0, 1), 0.0)) == [(3, 4)]
    assert exports(side.on_published(handoff, ready("k0", 0, 1), 0.0)) == [], "the same one again"
    assert exports(side.on_message(handoff, Ack(key="k0"), 0.0)) == [], "what D has is not on the device any more"
    assert exports(side.on_publish_failed(handoff, "k1", "no room")) == [(1, 2)]
    assert exports(side.on_published(handoff, ready("k2", 2, 3), 0.0)) == [(4, 5)]
    other = HandoffId("other", 2)
    side.open(other, Open(request=request(2, request_id="other"), held_tokens=0, backend="fake"), 0.0, "another")
    side.on_admitted(other, 0)
    side.on_message(other, Grant(credit_bytes=2 * BPT), 0.0)
    assert exports(side.on_computed("other#2", 2)) == []
    assert exports(side.release(handoff)) == [(0, 2)], "what was under way for it counts no more"
    assert side.release(other)
    assert side.is_idle


def test_pieces_that_stay_on_the_device_fill_the_buffer_until_they_are_discarded() -> None:
    """Where P and D are in one process nothing leaves it before: each is a whole chunk there, however few tokens it has."""
    side = prefill_side(TransferConfig(transfer_chunk_tokens=PIECE_TOKENS, transfer_buffer_bytes=2 * PIECE_TOKENS * BPT))
    handoff = HandoffId("r", 1)
    side.open(handoff, Open(request=request(5), held_tokens=0, backend="fake", max_piece_tokens=1), 0.0)
    side.on_admitted(handoff, 0)
    side.on_message(handoff, Grant(credit_bytes=5 * BPT), 0.0)
    assert exports(side.on_computed("r#1", 5)) == [(0, 1), (1, 2)]
    assert exports(side.on_published(handoff, ready("k0", 0, 1), 0.0, stays_tokens=PIECE_TOKENS)) == []
    assert exports(side.on_published(handoff, ready("k1", 1, 2), 0.0, stays_tokens=PIECE_TOKENS)) == []
    assert exports(side.on_message(handoff, Ack(key="k0"), 0.0)) == [(2, 3)]
    assert exports(side.on_published(handoff, ready("k2", 2, 3), 0.0)) == [(3, 4)], "over another backend it leaves"
    assert exports(side.on_message(handoff, Ack(key="k1"), 0.0)) == [(4, 5)]
    assert side.release(handoff)
    assert side.is_idle


class ShortPieces:
    """Pieces of one token that stay on the device as `stays_tokens` until they are acknowledged; room for eight chunks."""

    def __init__(self, stays_tokens: int) -> None:
        self.side = prefill_side(
            TransferConfig(transfer_chunk_tokens=PIECE_TOKENS, transfer_buffer_bytes=8 * PIECE_TOKENS * BPT)
        )
        self.stays_tokens = stays_tokens
        self.num_published = 0
        assert self.opened("first", num_tokens=1) == 1
        self.side.on_message(HandoffId("first", 1), Ack(key="k0"), 0.0)

    def opened(self, receiver: str, num_tokens: int = 40) -> int:
        """A prompt of as many of them is computed, all are wanted, and all that are cut are published; returns how many are."""
        handoff = HandoffId(receiver, 1)
        asked = request(num_tokens, request_id=receiver)
        self.side.open(handoff, Open(request=asked, held_tokens=0, backend="fake", max_piece_tokens=1), 0.0, receiver)
        self.side.on_admitted(handoff, 0)
        self.side.on_message(handoff, Grant(credit_bytes=num_tokens * BPT), 0.0)
        cut = exports(self.side.on_computed(f"{receiver}#1", num_tokens))
        num_cut = 0
        while cut:
            (begin, end), *cut = cut
            key = f"k{self.num_published}"
            cut += exports(self.side.on_published(handoff, ready(key, begin, end), 0.0, stays_tokens=self.stays_tokens))
            self.num_published += 1
            num_cut += 1
        return num_cut


@pytest.mark.parametrize(("stays_tokens", "num_alone"), [(4, 4), (2, 8), (1, 15), (0, 16)])
def test_who_takes_nothing_of_what_stays_on_the_device_leaves_room_there_for_others(stays_tokens: int, num_alone: int) -> None:
    """It counts as it lies there: padded. Alone a receiver has half of the device's room, as of the buffer's 32 tokens."""
    pieces = ShortPieces(stays_tokens)
    assert pieces.opened("stands-still") == num_alone
    assert pieces.opened("takes") >= 2
    assert pieces.opened("comes-late") >= 1
    assert (pieces.num_published - 1) * stays_tokens <= 8 * PIECE_TOKENS


def test_what_leaves_the_device_for_one_receiver_does_not_let_another_fill_it_with_what_stays() -> None:
    """They have unlike backends: one fetches from the device, the other from host memory."""
    pieces = ShortPieces(stays_tokens=4)
    assert pieces.opened("stands-still") == 4
    pieces.stays_tokens = 0
    assert pieces.opened("from-host-memory", num_tokens=3) == 3
    pieces.stays_tokens = 4
    assert pieces.opened("takes") >= 2


def test_two_pieces_are_always_let_go_when_there_is_room_for_them() -> None:
    prefill = Prefill(num_pieces_of_room=2)
    prefill.opened("only", 0)
    assert prefill.shares == {"only": 2}
    for _ in range(8):
        prefill.acknowledge("only")
    assert prefill.shares == {"only": 2}


def test_what_was_taken_long_ago_counts_for_nobody_s_share() -> None:
    prefill = Prefill(num_pieces_of_room=2)
    prefill.opened("again", 0)
    for _ in range(10):
        prefill.acknowledge("again")
    assert prefill.shares == {}
    prefill.opened("again", 1)
    assert prefill.shares == {"again": 2}


def beat(prefill: Prefill, now_s: float) -> list[str]:
    """Everybody is alive, and P looks now and then until `now_s`; returns who is refused, and why."""
    told = beat_once(prefill, prefill.now_s)
    while prefill.now_s < now_s:
        prefill.now_s = min(now_s, prefill.now_s + 0.5)
        told += beat_once(prefill, prefill.now_s)
    return told


def beat_once(prefill: Prefill, now_s: float) -> list[str]:
    for _, handoff, key in prefill.out:
        prefill.side.on_published(handoff, ready(key, 0, PIECE_TOKENS), 0.0)
    for handoff in prefill.receivers:
        prefill.side.on_heartbeat(handoff, now_s)
    actions = prefill.side.tick(now_s)
    prefill.note(actions)
    discarded = {action.key for action in actions if isinstance(action, act.Discard)}
    prefill.out[:] = [entry for entry in prefill.out if entry[2] not in discarded]
    replies = [action for action in actions if isinstance(action, act.Reply)]
    return [str(reply.message.error) for reply in replies if isinstance(reply.message, Refused)]


def test_those_who_take_nothing_make_room_when_another_waits_for_it() -> None:
    prefill = Prefill(num_pieces_of_room=8)
    for receiver in ("a", "b", "c"):
        prefill.opened(receiver, 0)
    assert prefill.shares == {"a": 4, "b": 2, "c": 2}
    assert beat(prefill, 0.0) == []
    prefill.opened("takes", 0)
    assert "takes" not in prefill.shares
    assert beat(prefill, 29.9) == []
    told = beat(prefill, 30.1)
    assert told == [f"request {r}-0: published pieces not fetched for 30.1 s, and others need their room" for r in "abc"]
    assert prefill.shares == {"takes": 4}


def test_who_takes_nothing_is_waited_for_while_nobody_else_needs_the_room() -> None:
    prefill = Prefill(num_pieces_of_room=2)
    prefill.opened("only", 0)
    prefill.opened("only", 1)
    for now_s in (0.0, 30.0, 60.0, 99.0):
        assert beat(prefill, now_s) == []
    assert prefill.shares == {"only": 2}


def test_who_takes_a_piece_now_and_then_is_slow_and_keeps_its_share() -> None:
    prefill = Prefill(num_pieces_of_room=2)
    for number in range(2):
        prefill.opened("slow", number)
    prefill.opened("waits", 0)
    assert prefill.shares == {"slow": 2}
    assert beat(prefill, 29.0) == []
    prefill.acknowledge("slow", 29.0)  # of one of its hand-offs: the others wait their turn in its queue
    assert beat(prefill, 31.0) == []
    prefill.acknowledge("waits", 31.0)
    assert beat(prefill, 58.9) == []
    assert [told.split(":")[0] for told in beat(prefill, 59.1)] == ["request slow-0"]


def test_time_in_which_p_stood_still_itself_is_held_against_no_receiver() -> None:
    prefill = Prefill(num_pieces_of_room=2)
    prefill.opened("slow", 0)
    prefill.opened("waits", 0)
    assert beat(prefill, 20.0) == []
    prefill.now_s = 60.0
    assert beat(prefill, 69.9) == []
    assert len(beat(prefill, 70.5)) == 1


def test_a_large_piece_may_take_as_long_as_a_slow_network_needs() -> None:
    prefill = Prefill(num_pieces_of_room=2, bytes_per_token=2**20)
    prefill.opened("slow", 0)
    prefill.opened("waits", 0)
    assert beat(prefill, 0.0) == []
    assert beat(prefill, 41.9) == []
    assert len(beat(prefill, 42.0)) == 1
