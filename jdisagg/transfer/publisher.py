"""P's half of every backend, or D's for what it lends: what is published waits in a thread of its own to become an offer.

    engine thread    publish -> bytes counted -> | lane: put -> Published, or PublishFailed and the bytes gone
                     discard -> bytes gone    -> | lane: discard

A backend is what `put` makes of a piece. The lane runs both in the order in which they were asked for, so that nothing is
stored for a piece after it was discarded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.transfer.base import Piece, Post, Published, PublishFailed
from jdisagg.transfer.lanes import CLOSE_TIMEOUT_S, Lane
from jdisagg.transfer.target import num_bytes_of

log = logging.getLogger(__name__)
_EXPECTED = (RuntimeError, ValueError, MemoryError, OSError)  # of a device, an allocator, a socket; others are bugs


class Offers(Protocol):
    """Pieces where D can get them. All run on the publisher's lane, `close` as the last."""

    def put(self, key: str, piece: Piece) -> tuple[ChunkReady, int]:
        """Wait for the device and make the piece fetchable; returns its announcement, and as many as how many tokens it lies
        on the device until it is discarded. Whatever it raises fails this piece."""
        ...

    def discard(self, key: str) -> None:
        """Free the piece; unknown keys are ignored."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class LanePublisher:
    """A backend's Publisher."""

    def __init__(self, name: str, offers: Offers, post: Post, *, on_idle: Callable[[], None] = lambda: None) -> None:
        """`name`: the backend's; `on_idle` runs on the lane whenever nothing was asked for a while."""
        self.name = name
        self._offers = offers
        self._post = post
        # No lock: both threads write, single dict operations only.
        self._sizes: dict[str, int] = {}  # from publish to discard
        self._queued: dict[str, Piece] = {}  # until the lane has come to them: one that is discarded leaves the device at once
        self._lane = Lane(f"{name}-publish", on_idle)

    def publish(self, handoff: HandoffId, key: str, piece: Piece) -> None:
        """Make the piece fetchable on the transfer thread; answers Published or PublishFailed, nothing once discarded."""
        assert piece.begin < piece.end, f"piece [{piece.begin}, {piece.end}) of {handoff} is empty"
        self._sizes[key], self._queued[key] = num_bytes_of(piece), piece
        self._lane.submit(lambda: self._put(handoff, key))

    def _put(self, handoff: HandoffId, key: str) -> None:
        if (piece := self._queued.pop(key, None)) is None:
            return
        try:
            ready, stays_tokens = self._offers.put(key, piece)
        except Exception as error:  # whatever it is, it concerns this piece; the lane serves the next one
            level = logging.WARNING if isinstance(error, _EXPECTED) else logging.ERROR
            told = (self.name, piece.begin, piece.end, handoff, error)
            log.log(level, "%s: publishing piece [%d, %d) of %s: %r", *told, exc_info=level > logging.WARNING)
            self._offers.discard(key)
            self._sizes.pop(key, None)
            begin, end, reason = piece.begin, piece.end, f"device: {error}"
            self._post(PublishFailed(handoff=handoff, key=key, begin=begin, end=end, reason=reason, backend=self.name))
            return
        if key in self._sizes:
            self._post(Published(handoff=handoff, ready=ready, stays_tokens=stays_tokens))

    def discard(self, key: str) -> None:
        """Free the piece; one that is put or offered, behind whatever the transfer thread is doing."""
        self._queued.pop(key, None)
        if self._sizes.pop(key, None) is not None:
            self._lane.submit(lambda: self._offers.discard(key))

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes held for pieces that are published or being published."""
        return sum(list(self._sizes.values()))

    def close(self) -> None:
        """Free everything and end the thread."""
        for key in list(self._sizes):
            self.discard(key)
        self._lane.submit(self._offers.close)
        self._lane.stop()
        self._lane.join(CLOSE_TIMEOUT_S)
