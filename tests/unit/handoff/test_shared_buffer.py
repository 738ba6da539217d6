"""A prefill worker's buffer between its receivers: who takes nothing, or too slowly, keeps no other from its pieces."""

from __future__ import annotations

from jdisagg.core.config import TransferConfig
from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import Ack, Grant, HandoffId, Open
from jdisagg.handoff.prefill_side import PrefillSide
from tests.unit.handoff.rig import BPT, prefill_side, request

PIECE_TOKENS, PIECE_BYTES = 4, 4 * BPT


class Prefill:
    """Prompts of ten pieces, all computed, whose decode workers have granted credit for everything."""

    def __init__(self, num_pieces_of_room: int) -> None:
        room = num_pieces_of_room * PIECE_BYTES
        self.side: PrefillSide = prefill_side(TransferConfig(transfer_chunk_tokens=PIECE_TOKENS, transfer_buffer_bytes=room))
        self.out: list[tuple[str, HandoffId, str]] = []  # receiver, hand-off, key of pieces that were not acknowledged
        self._receivers: dict[HandoffId, str] = {}

    def opened(self, receiver: str, number: int) -> HandoffId:
        handoff = HandoffId(f"{receiver}-{number}", 1)
        self._receivers[handoff] = receiver
        asked = request(10 * PIECE_TOKENS, request_id=handoff.request_id)
        self.side.open(handoff, Open(request=asked, held_tokens=0, backend="fake"), 0.0, receiver)
        self.side.on_admitted(handoff, 0)
        self.side.on_message(handoff, Grant(credit_bytes=10 * PIECE_BYTES), 0.0)
        self._note(self.side.on_computed(f"{handoff.request_id}#1", 10 * PIECE_TOKENS))
        return handoff

    def acknowledge(self, receiver: str) -> None:
        """The oldest piece of a receiver."""
        entry = next(entry for entry in self.out if entry[0] == receiver)
        self.out.remove(entry)
        self._note(self.side.on_message(entry[1], Ack(key=entry[2]), 0.0))

    def _note(self, actions: list[act.PrefillAction]) -> None:
        exports = [action for action in actions if isinstance(action, act.Export)]
        self.out += [(self._receivers[export.handoff], export.handoff, export.key) for export in exports]

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
