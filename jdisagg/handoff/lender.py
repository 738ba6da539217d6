"""D's half of the mirror: KV that D holds is published for P, which would have to compute it again. Events in, actions out.

    open         D opened a stream and holds KV of the first `held_tokens` tokens, pinned while the stream lives
    on_message   Want begins a loan, Grant lets it go on, Ack takes a piece back
    tick         pieces that P does not fetch are taken back after `lease_s`; room that a release made is used
    release      the stream is over, whatever ended it: nothing of its loan stays published, and nothing is cut, since the
                 request may have lost its pages, and may have another stream that is released next

Pieces are cut by the same queue as P's, within P's credit and `transfer_buffer_bytes`. A loan is over when everything was
acknowledged, when its lease is, or when a piece cannot be published; P computes what it did not get.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jdisagg.core.config import TransferConfig
from jdisagg.core.looks import Looks
from jdisagg.handoff import actions as act
from jdisagg.handoff.exports import ExportAction, ExportQueue, unguessable_key
from jdisagg.handoff.messages import Ack, ChunkReady, Declined, Grant, HandoffId, Want
from jdisagg.handoff.outbound import OutgoingPiece

LenderAction = ExportAction | act.Send


@dataclass(slots=True)
class Loan:
    """What P wants of one stream's KV: tokens [begin, end), of which [begin, cut) was cut into pieces."""

    handoff: HandoffId
    begin: int
    end: int
    piece_tokens: int  # of a piece: the smaller of what D cuts and what P takes
    heard_s: float  # last sign of P, or last publication
    cut: int
    receiver: str = ""  # not told apart: a loan that is not fetched ends with its lease
    credit_bytes: int = 0  # cumulative
    spent_bytes: int = 0
    pieces: dict[str, OutgoingPiece] = field(default_factory=dict)

    @property
    def engine_request_id(self) -> str:
        """The request whose pages are read."""
        return self.handoff.request_id

    @property
    def is_returned(self) -> bool:
        """Everything was published and acknowledged."""
        return self.cut >= self.end and not self.pieces

    def next_span(self) -> tuple[int, int] | None:
        """The next range to cut: all of it is in place."""
        return (self.cut, min(self.cut + self.piece_tokens, self.end)) if self.cut < self.end else None

    def take(self, span: tuple[int, int]) -> None:
        """`span` is cut."""
        self.cut = span[1]


class Lender:
    """Every loan of one decode worker. Owned by its engine thread; `new_key` makes unguessable, unique keys."""

    def __init__(self, config: TransferConfig, *, bytes_per_token: int, new_key: Callable[[], str] = unguessable_key) -> None:
        self._config = config
        self._exports = ExportQueue(config, bytes_per_token=bytes_per_token, new_key=new_key)
        self._looks = Looks()
        self._held: dict[HandoffId, int] = {}
        self._loans: dict[HandoffId, Loan] = {}

    # --- streams

    def open(self, handoff: HandoffId, held_tokens: int) -> None:
        """P may want any of the first `held_tokens` tokens until `release`."""
        self._held[handoff] = held_tokens

    def on_message(self, handoff: HandoffId, message: Want | Grant | Ack, now_s: float) -> list[LenderAction]:
        """A message of P; one of a stream or loan that is over changes nothing."""
        loan = self._loans.get(handoff)
        if isinstance(message, Want):
            return self._on_want(handoff, message, loan, now_s)
        if loan is None:
            return []
        loan.heard_s = now_s
        match message:
            case Grant(credit_bytes=credit_bytes):
                loan.credit_bytes = max(loan.credit_bytes, credit_bytes)
                return [*self._exports.pump(loan)]
            case Ack(key=key):
                discards = self._exports.discard(loan, key)
                return [*discards, *(self._end(handoff) if loan.is_returned else []), *self._exports.pump()]

    def release(self, handoff: HandoffId) -> list[ExportAction]:
        """The stream is over; idempotent."""
        self._held.pop(handoff, None)
        return self._end(handoff)

    # --- the transfer

    def on_published(self, handoff: HandoffId, ready: ChunkReady, now_s: float, *, stays_tokens: int = 0) -> list[LenderAction]:
        """The piece can be fetched; as many as `stays_tokens` lie on the device until it is discarded."""
        loan = self._loans.get(handoff)
        piece = None if loan is None else loan.pieces.get(ready.key)
        if loan is None or piece is None:
            return [act.Discard(ready.key)]
        if piece.published:
            return []
        loan.heard_s = max(loan.heard_s, now_s)
        return [act.Send(handoff, ready), *self._exports.published(loan, piece, stays_tokens=stays_tokens)]

    def on_publish_failed(self, handoff: HandoffId, key: str, reason: str) -> list[LenderAction]:
        """A piece never became fetchable: P computes what it has not got yet. One of a loan that is over changes nothing."""
        loan = self._loans.get(handoff)
        return [] if loan is None or key not in loan.pieces else self._decline(handoff, f"publishing failed: {reason}")

    def tick(self, now_s: float) -> list[LenderAction]:
        """Leases, and what others may cut now that a stream is over."""
        if still_s := self._looks.stood_still_s(now_s):
            for loan in self._loans.values():
                loan.heard_s = min(now_s, loan.heard_s + still_s)
        actions: list[LenderAction] = []
        for handoff, loan in list(self._loans.items()):
            if now_s - loan.heard_s >= self._config.lease_s:
                actions += self._decline(handoff, f"not fetched for {now_s - loan.heard_s:.1f} s")
        return [*actions, *self._exports.pump()]

    # --- helpers

    def _on_want(self, handoff: HandoffId, want: Want, loan: Loan | None, now_s: float) -> list[LenderAction]:
        held = self._held.get(handoff)
        if held is None:
            return []
        if loan is not None or want.group or not 0 <= want.begin < want.end <= held:
            text = f"Want [{want.begin}, {want.end}) of group {want.group}: [0, {held}) of group 0 is lent, once at a time"
            return self._decline(handoff, text)
        if want.piece_tokens < 0:
            return self._decline(handoff, f"Want in pieces of {want.piece_tokens} tokens, wanted 1 or more, or 0 for any")
        most = self._config.transfer_chunk_tokens
        tokens = min(most, want.piece_tokens or most)
        self._loans[handoff] = Loan(handoff, want.begin, want.end, tokens, now_s, cut=want.begin)
        return []  # credit follows

    def _decline(self, handoff: HandoffId, reason: str) -> list[LenderAction]:
        return [*self._end(handoff), act.Send(handoff, Declined(reason=reason)), *self._exports.pump()]

    def _end(self, handoff: HandoffId) -> list[ExportAction]:
        loan = self._loans.pop(handoff, None)
        return [] if loan is None else self._exports.remove(loan)

    # --- views

    @property
    def is_idle(self) -> bool:
        """No stream may want anything, and nothing is published."""
        assert self._loans or not self._exports.buffered_bytes, f"no loan, and {self._exports.buffered_bytes} bytes published"
        return not self._held and not self._loans

    @property
    def num_loans(self) -> int:
        """Loans that are not over."""
        return len(self._loans)

    def snapshot(self) -> dict[str, Any]:
        """Loans by request and stream, as JSON-able data."""
        return {
            f"{handoff.request_id}#{handoff.serial}": {
                "wanted": [loan.begin, loan.end],
                "cut_tokens": loan.cut,
                "pieces": len(loan.pieces),
            }
            for handoff, loan in self._loans.items()
        }
