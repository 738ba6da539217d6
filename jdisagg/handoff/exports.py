"""Which tokens are published next, for all hand-offs of a worker within one buffer: P's chunks, or what D lends.

`transfer_buffer_bytes` bounds what is exported and not yet discarded. Hand-offs with something to cut take turns, one piece
each, in the order in which they became ready; one that does not fit makes the others wait, so a big piece is never overtaken
for ever. A piece larger than the whole buffer goes when the buffer is empty.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Protocol

from jdisagg.core.config import TransferConfig
from jdisagg.handoff.actions import Discard, Export, PrefillAction
from jdisagg.handoff.messages import HandoffId
from jdisagg.handoff.outbound import OutgoingPiece


def unguessable_key() -> str:
    """A name for a piece that nobody can guess: whoever knows it may fetch the piece."""
    return secrets.token_urlsafe(18)


class Source(Protocol):
    """What pieces are cut from: one hand-off's tokens, and the receiver's credit."""

    handoff: HandoffId
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

    def take(self, span: tuple[int, int], num_bytes: int, key: str) -> None:
        """Cut `span`, as given by next_span, into the piece `key`."""
        ...


class ExportQueue:
    """Cuts pieces and counts their bytes until they are discarded. `new_key` makes unguessable, unique keys."""

    def __init__(self, config: TransferConfig, *, bytes_per_token: int, new_key: Callable[[], str] = unguessable_key) -> None:
        assert bytes_per_token > 0, f"bytes_per_token is {bytes_per_token}"
        self._config = config
        self._bytes_per_token = bytes_per_token
        self._new_key = new_key
        self._turns: dict[HandoffId, Source] = {}  # hand-offs that may have something to cut, in turn
        self._buffered_bytes = 0

    @property
    def buffered_bytes(self) -> int:
        """Bytes exported and not yet discarded."""
        return self._buffered_bytes

    def pump(self, ready: Source | None = None) -> list[PrefillAction]:
        """Cut whatever credit and buffer allow, one piece per turn; `ready` has something new to cut."""
        if ready is not None:
            self._turns.setdefault(ready.handoff, ready)
        actions: list[PrefillAction] = []
        while self._turns:
            handoff, record = next(iter(self._turns.items()))
            span = record.next_span()
            num_bytes = 0 if span is None else (span[1] - span[0]) * self._bytes_per_token
            if span is not None and record.spent_bytes + num_bytes <= record.credit_bytes:
                if self._buffered_bytes and self._buffered_bytes + num_bytes > self._config.transfer_buffer_bytes:
                    break
                key = self._new_key()
                record.take(span, num_bytes, key)
                self._buffered_bytes += num_bytes
                self._turns[handoff] = self._turns.pop(handoff)  # to the end of the queue
                actions.append(Export(handoff, record.engine_request_id, *span, key))
            else:
                del self._turns[handoff]  # comes back with its next chunk or grant
        return actions

    def discard(self, record: Source, key: str) -> list[PrefillAction]:
        """Give up a piece of `record`; unknown keys are ignored."""
        piece = record.pieces.pop(key, None)
        if piece is None:
            return []
        self._buffered_bytes -= piece.num_bytes
        return [Discard(key)]

    def remove(self, record: Source) -> list[PrefillAction]:
        """The hand-off is over: its pieces are discarded, others may use the room."""
        self._turns.pop(record.handoff, None)
        return [action for key in list(record.pieces) for action in self.discard(record, key)]
