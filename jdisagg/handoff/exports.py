"""Which tokens are published next, for all hand-offs of a worker within one buffer: P's chunks, or what D lends.

`transfer_buffer_bytes` bounds what is exported and not yet discarded. Receivers take turns, and so do the hand-offs of each
that have something to cut, one piece each, in the order in which they became ready; one that does not fit makes the others
wait, so a big piece is never overtaken for ever. A piece larger than the whole buffer goes when the buffer is empty.

A receiver that has two pieces or more out gets no more than what is free beside them: alone it fills half of the buffer, and
one that stands still, or has a slow network, leaves room for others. Where several do, `standstill` says whose turn is over.

Until it is published a piece lies on the device, and takes as much there as a whole chunk, however few tokens it has; some
backends keep it there, padded, until it is discarded. No more lies there than fills the buffer in whole chunks, and with such a
backend a receiver has its share of that, as of the buffer.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jdisagg.core.config import TransferConfig
from jdisagg.handoff.actions import Discard, Export
from jdisagg.handoff.credit import most_pieces_of
from jdisagg.handoff.messages import HandoffId
from jdisagg.handoff.outbound import OutgoingPiece

ExportAction = Export | Discard


def unguessable_key() -> str:
    """A name for a piece that nobody can guess: whoever knows it may fetch the piece."""
    return secrets.token_urlsafe(18)


class Source(Protocol):
    """What pieces are cut from: one hand-off's tokens, and the receiver's credit."""

    handoff: HandoffId
    receiver: str  # "" = unknown: no share of the buffer is kept from it
    credit_bytes: int
    spent_bytes: int
    pieces: dict[str, OutgoingPiece]

    @property
    def engine_request_id(self) -> str:
        """Whose pages hold the tokens."""
        ...

    def next_span(self) -> tuple[int, int] | None:
        """The next range that is ready to be cut."""
        ...

    def take(self, span: tuple[int, int]) -> None:
        """`span`, as given by next_span, is cut."""
        ...


@dataclass(slots=True)
class _Out:
    """What one receiver has out: exported, and not yet discarded."""

    num_pieces: int = 0
    num_bytes: int = 0
    device_tokens: int = 0  # as many as which it takes on the device
    stays: bool | None = None  # whether the last one stayed there once it was published: each may have a backend of its own


class ExportQueue:
    """Cuts pieces and counts their bytes until they are discarded. `new_key` makes unguessable, unique keys."""

    def __init__(self, config: TransferConfig, *, bytes_per_token: int, new_key: Callable[[], str] = unguessable_key) -> None:
        assert bytes_per_token > 0, f"bytes_per_token is {bytes_per_token}"
        self._config = config
        self._bytes_per_token = bytes_per_token
        self._new_key = new_key
        self._turns: dict[str, dict[HandoffId, Source]] = {}  # by receiver: who may have something to cut; both in turn
        self._out: dict[str, _Out] = {}  # by receiver, of those that have some
        self._free_tokens = most_pieces_of(config, bytes_per_token) * config.transfer_chunk_tokens  # on the device
        self._is_staying = False  # whether the last published piece stayed there

    @property
    def buffered_bytes(self) -> int:
        """Bytes exported and not yet discarded."""
        return sum(out.num_bytes for out in self._out.values())

    def pump(self, ready: Source | None = None) -> list[ExportAction]:
        """Cut whatever credit and buffer allow, one piece per turn; `ready` has something new to cut."""
        if ready is not None:
            self._turns.setdefault(ready.receiver, {}).setdefault(ready.handoff, ready)
        actions: list[ExportAction] = []
        num_passed = 0  # receivers, in turn, that have their share
        while num_passed < len(self._turns) and self._free_tokens >= self._config.transfer_chunk_tokens:
            receiver, sources = next(iter(self._turns.items()))
            found = self._next_of(sources)
            if found is None:
                del self._turns[receiver]  # comes back with a chunk or grant of one of its hand-offs
                continue
            record, span, num_bytes = found
            free_bytes = self._config.transfer_buffer_bytes - self.buffered_bytes
            has_share = self._has_share(receiver, num_bytes, free_bytes)
            if not has_share and self.buffered_bytes and num_bytes > free_bytes:
                break
            self._turns[receiver] = self._turns.pop(receiver)  # to the end of the queue
            if has_share:
                num_passed += 1
                continue
            num_passed = 0
            key = self._new_key()
            record.take(span)
            record.spent_bytes += num_bytes
            record.pieces[key] = OutgoingPiece(*span, num_bytes, device_tokens=self._config.transfer_chunk_tokens)
            out = self._out.setdefault(receiver, _Out())
            out.num_pieces += 1
            out.num_bytes += num_bytes
            self._take_device(out, self._config.transfer_chunk_tokens)
            sources[record.handoff] = sources.pop(record.handoff)
            actions.append(Export(record.handoff, record.engine_request_id, *span, key))
        return actions

    def others_wait(self, receiver: str) -> bool:
        """Whether somebody beside `receiver` has a piece to be cut, and no room for it."""
        return any(other != receiver and self._next_of(sources) is not None for other, sources in self._turns.items())

    def _next_of(self, sources: dict[HandoffId, Source]) -> tuple[Source, tuple[int, int], int] | None:
        """A receiver's hand-off whose turn it is, what it cuts and how many bytes that is. Those with nothing to cut leave."""
        while sources:
            handoff, record = next(iter(sources.items()))
            span = record.next_span()
            num_bytes = 0 if span is None else (span[1] - span[0]) * self._bytes_per_token
            if span is not None and record.spent_bytes + num_bytes <= record.credit_bytes:
                return record, span, num_bytes
            del sources[handoff]  # comes back with its next chunk or grant
        return None

    def _has_share(self, receiver: str, num_bytes: int, free_bytes: int) -> bool:
        """Whether the receiver has enough out, so that others go first."""
        out = self._out.get(receiver) if receiver else None
        if out is None or out.num_pieces < 2:
            return False
        has_device = out.device_tokens + self._config.transfer_chunk_tokens > self._free_tokens
        stays = self._is_staying if out.stays is None else out.stays
        return (stays and has_device) or out.num_bytes + num_bytes > free_bytes

    def _take_device(self, out: _Out, num_tokens: int) -> None:
        """That many more, or less."""
        self._free_tokens -= num_tokens
        out.device_tokens += num_tokens

    def published(self, record: Source, piece: OutgoingPiece, *, stays_tokens: int) -> list[ExportAction]:
        """A piece of `record` can be fetched. Until it is discarded it takes no more than `stays_tokens` of the device."""
        out = self._out[record.receiver]
        self._is_staying = out.stays = stays_tokens > 0
        self._take_device(out, stays_tokens - piece.device_tokens)
        piece.published, piece.device_tokens = True, stays_tokens
        return self.pump()

    def discard(self, record: Source, key: str) -> list[ExportAction]:
        """Give up a piece of `record`; unknown keys are ignored."""
        piece = record.pieces.pop(key, None)
        if piece is None:
            return []
        out = self._out[record.receiver]
        self._take_device(out, -piece.device_tokens)
        out.num_pieces -= 1
        out.num_bytes -= piece.num_bytes
        if not out.num_pieces:
            del self._out[record.receiver]
        return [Discard(key)]

    def withdraw(self, record: Source) -> None:
        """Nothing more is cut from it, unless it has something new."""
        self._turns.get(record.receiver, {}).pop(record.handoff, None)

    def end(self, record: Source) -> list[ExportAction]:
        """Nothing of it is needed any more: pieces nobody has heard of are discarded. The others may be on their way: to take
        them away now would look like a fault."""
        self.withdraw(record)
        unheard = [key for key, piece in record.pieces.items() if not piece.published]
        return [action for key in unheard for action in self.discard(record, key)]

    def remove(self, record: Source) -> list[ExportAction]:
        """The hand-off is over: its pieces are discarded, others may use the room."""
        self.withdraw(record)
        return [action for key in list(record.pieces) for action in self.discard(record, key)]
