"""One hand-off as P sees it: what D lacks, what was cut from it so far, and what is published.

    QUEUED -> COMPUTING -> COMPUTED <-> PARKED
       |           |-> ENDED   |          |
       |___________|_____|_____|__________|  stream end, deadline, lease, failure, or everything delivered: released

Tokens D needs are [held, total). They are cut in order, in whole chunks while the prompt computes on and the rest with its
end, each as one piece. A piece belongs to the transfer from Export until Discard.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from jdisagg.core.requests import EngineRequest
from jdisagg.handoff.messages import HandoffId

MOST_AGAIN = 16  # times that D may want each piece again, on average: it tries twice over each backend, and there are four


class OutboundStage(Enum):
    """Where P's hand-off is."""

    QUEUED = "queued"  # Admit was given
    COMPUTING = "computing"  # Accepted was sent
    COMPUTED = "computed"  # Done was sent; pieces may be missing
    PARKED = "parked"  # computed once; its pages were given to others until D has some: see `full_pool`
    ENDED = "ended"  # Done was sent, with the last token: D needs no KV at all, but fetches until it has heard so


_NEXT = {
    OutboundStage.QUEUED: frozenset({OutboundStage.COMPUTING}),
    OutboundStage.COMPUTING: frozenset({OutboundStage.COMPUTED, OutboundStage.ENDED}),
    OutboundStage.COMPUTED: frozenset({OutboundStage.PARKED}),
    OutboundStage.PARKED: frozenset({OutboundStage.COMPUTED}),
    OutboundStage.ENDED: frozenset(),
}


@dataclass(slots=True)
class OutgoingPiece:
    """Tokens [begin, end) under a key; not fetchable before `published`."""

    begin: int
    end: int
    num_bytes: int
    device_tokens: int  # as many as which it lies on the device
    published: bool = False


@dataclass(slots=True)
class Outbound:
    """One stream a D opened."""

    handoff: HandoffId
    request: EngineRequest  # as D sent it
    held_tokens: int
    heard_s: float  # last sign of life of D, or last publication
    chunk_tokens: int  # of a piece: the smaller of what P cuts and what D takes
    receiver: str = ""  # the D that opened it, as far as this P tells them apart
    stage: OutboundStage = OutboundStage.QUEUED
    credit_bytes: int = 0  # cumulative
    spent_bytes: int = 0  # cumulative, at most `credit_bytes`
    cut: int = 0  # [held, cut) was cut into pieces
    computed: int = 0  # KV of [0, computed) is dispatched
    again: deque[tuple[int, int]] = field(default_factory=deque)  # ranges to publish once more
    pieces: dict[str, OutgoingPiece] = field(default_factory=dict)
    num_cut: int = 0
    num_failures: int = 0

    def move(self, stage: OutboundStage) -> None:
        """Change stage; anything the table does not list is our bug."""
        assert stage in _NEXT[self.stage], f"hand-off {self.handoff}: {self.stage.value} -> {stage.value}"
        self.stage = stage

    @property
    def engine_request_id(self) -> str:
        """The id under which the request runs here, unique per stream."""
        return f"{self.handoff.request_id}#{self.handoff.serial}"

    @property
    def total(self) -> int:
        """One past the last token D needs; nothing is sent for a request that ends with the first token."""
        return self.request.num_tokens if self.request.remaining_tokens > 1 and self.stage is not OutboundStage.ENDED else 0

    def next_span(self) -> tuple[int, int] | None:
        """The next range that is ready to be cut."""
        if self.stage is OutboundStage.ENDED:
            return None
        if self.again:
            return self.again[0]
        if self.total - self.cut <= 0:
            return None
        if min(self.computed, self.total) - self.cut >= self.chunk_tokens:
            return self.cut, self.cut + self.chunk_tokens
        return (self.cut, self.total) if self.computed >= self.total else None

    def take(self, span: tuple[int, int]) -> None:
        """`span`, as given by next_span, is cut."""
        if self.again and self.again[0] == span:
            self.again.popleft()
        else:
            self.cut = span[1]
        self.num_cut += 1

    @property
    def is_worn_out(self) -> bool:
        """D has wanted so much of it again that it can hardly be after the KV."""
        num_pieces = -(-(self.cut - self.held_tokens) // self.chunk_tokens)
        return self.num_cut + len(self.again) - num_pieces >= MOST_AGAIN * num_pieces

    @property
    def num_chunks(self) -> int:
        """Pieces of this stream in all, those still to come included."""
        return self.num_cut + len(self.again) + -(-max(0, self.total - self.cut) // self.chunk_tokens)

    @property
    def is_told(self) -> bool:
        """D has its first token."""
        return self.stage not in (OutboundStage.QUEUED, OutboundStage.COMPUTING)

    @property
    def is_awaited(self) -> bool:
        """D has pages for it and its prompt is not computed (any more)."""
        return self.credit_bytes > 0 and self.computed < self.total

    @property
    def is_parkable(self) -> bool:
        """D has its token, and no pages for its KV."""
        return self.stage is OutboundStage.COMPUTED and self.credit_bytes == 0

    def park(self) -> None:
        """Its KV is gone. Nothing of it was cut: that takes credit."""
        assert self.is_parkable, f"hand-off {self.handoff} cannot be parked: {self.summary()}"
        self.move(OutboundStage.PARKED)
        self.computed = 0

    def end(self) -> None:
        """Its first token is its last: nothing more is cut from it."""
        self.move(OutboundStage.ENDED)
        self.again.clear()

    @property
    def delivered(self) -> bool:
        """Whether D has everything it was owed."""
        is_told = self.stage in (OutboundStage.COMPUTED, OutboundStage.ENDED)
        return is_told and not self.pieces and not self.again and self.cut >= self.total

    def key_of(self, begin: int, end: int) -> str | None:
        """The key under which exactly [begin, end) is out."""
        return next((key for key, piece in self.pieces.items() if (piece.begin, piece.end) == (begin, end)), None)

    def summary(self) -> dict[str, Any]:
        """JSON-able state."""
        return {
            "stage": self.stage.value,
            "held_tokens": self.held_tokens,
            "computed_tokens": self.computed,
            "cut_tokens": self.cut,
            "pieces": len(self.pieces),
            "credit_bytes": self.credit_bytes,
            "spent_bytes": self.spent_bytes,
        }
