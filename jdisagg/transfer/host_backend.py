"""Pieces that travel as bytes through host memory: what the backends "grpc" and "shm" share.

    P's engine   publish -> lane: device to host, trim, checksum -> ByteStore -> Published(key, locator)
    D's engine   fetch -> lane of the peer: ByteSource.read, verify, pad, device_put, confirm -> PieceArrived

A backend is a store on P and a source on D that reads what the store holds; the locator is their secret.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from jdisagg.handoff.messages import HandoffId
from jdisagg.transfer.base import Piece, Post, Published, PublishFailed
from jdisagg.transfer.lanes import CLOSE_TIMEOUT_S, FetchJob, Lane, LaneFetcher
from jdisagg.transfer.target import PieceError, PieceTarget, announce, checksum_of, num_bytes_of, pack

log = logging.getLogger(__name__)

ALIGN_BYTES = 64


class ByteStore(Protocol):
    """P's bytes by key. `put` is called from the publisher's thread, everything else from the engine's."""

    def reserve(self, key: str, num_bytes: int) -> bool:
        """Take room for a piece whose bytes come later; False when there is none."""
        ...

    def put(self, key: str, data: memoryview) -> bool:
        """Store the bytes of a reserved piece; False when it was discarded meanwhile.

        Raises OSError, MemoryError, and ValueError once closed.
        """
        ...

    def locator(self, key: str) -> str:
        """What the source needs beside the key; "" = nothing."""
        ...

    def discard(self, key: str) -> None:
        """Free the piece; unknown keys are ignored."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes reserved."""
        ...

    def close(self) -> None:
        """Free everything; nothing is put any more."""
        ...


class ByteSource(Protocol):
    """D's way to the bytes of a peer's pieces; called from transfer threads."""

    def read(self, peer: str, key: str, deadline_s: float) -> Iterator[bytes]:
        """Yield the bytes of the piece that `key` (or its locator) names, in order, ending before `deadline_s` (monotonic).

        Raises KeyError when the peer has no such piece, TimeoutError at the deadline, ConnectionError for everything else.
        """
        ...


class HostPublisher:
    """P's half. `checksums=False` saves the hash where the network is trusted."""

    def __init__(self, name: str, store: ByteStore, post: Post, *, checksums: bool = True) -> None:
        self.name = name
        self._store = store
        self._post = post
        self._checksums = checksums
        self._lane = Lane(f"{name}-publish")

    def publish(self, handoff: HandoffId, key: str, piece: Piece) -> None:
        """Copy the piece to the host on the transfer thread; answers Published or PublishFailed, nothing once discarded."""
        assert piece.begin < piece.end, f"piece [{piece.begin}, {piece.end}) of {handoff} is empty"
        if not self._store.reserve(key, num_bytes_of(piece)):
            self._fail(handoff, key, piece, "buffer_full")
            return
        self._lane.submit(lambda: self._copy(handoff, key, piece))

    def _copy(self, handoff: HandoffId, key: str, piece: Piece) -> None:
        try:
            data = pack(piece)
            stored = self._store.put(key, data)
        except (RuntimeError, ValueError, MemoryError, OSError) as error:
            log.warning("%s: publishing piece [%d, %d) of %s: %s", self.name, piece.begin, piece.end, handoff, error)
            self._store.discard(key)
            self._fail(handoff, key, piece, f"device: {error}")
            return
        if stored:
            checksum = checksum_of(data) if self._checksums else 0
            ready = announce(key, piece, checksum, backend=self.name, locator=self._store.locator(key))
            self._post(Published(handoff=handoff, ready=ready))

    def _fail(self, handoff: HandoffId, key: str, piece: Piece, reason: str) -> None:
        self._post(PublishFailed(handoff=handoff, key=key, begin=piece.begin, end=piece.end, reason=reason, backend=self.name))

    def discard(self, key: str) -> None:
        """Free the bytes."""
        self._store.discard(key)

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes held for pieces that are published or being published."""
        return self._store.num_bytes

    def close(self) -> None:
        """Free everything and end the thread."""
        self._lane.stop()
        self._lane.join(CLOSE_TIMEOUT_S)
        self._store.close()


def host_fetcher(name: str, source: ByteSource, target: PieceTarget, post: Post) -> LaneFetcher:
    """D's half. Before closing it, close a source whose reads may be waiting on a dead peer."""
    return LaneFetcher(name, _Reads(source, target).obtain, post)


class _Reads:
    """Pieces out of a ByteSource. A cancelled read stops at its next part."""

    def __init__(self, source: ByteSource, target: PieceTarget) -> None:
        self._source = source
        self._target = target

    def obtain(self, job: FetchJob) -> Piece:
        self._target.check(job.ready)
        return self._target.arrived(job.ready, self._target.unpack(self._read(job), job.ready))

    def _read(self, job: FetchJob) -> memoryview:
        ready = job.ready
        data, filled = _aligned(ready.num_bytes), 0
        try:
            for part in self._source.read(job.peer, ready.locator or ready.key, job.deadline_s):
                if job.cancelled:
                    raise PieceError("connection", "cancelled")
                if filled + len(part) > ready.num_bytes:
                    raise PieceError("truncated", f"got more than the announced {ready.num_bytes} bytes")
                data[filled : filled + len(part)] = part
                filled += len(part)
        except KeyError as error:
            raise PieceError("unknown_key", str(error)) from error
        except TimeoutError as error:
            raise PieceError("timeout", str(error)) from error
        except ConnectionError as error:
            raise PieceError("connection", str(error)) from error
        return data[:filled]


def _aligned(num_bytes: int) -> memoryview:
    """A fresh buffer for one piece, aligned so that XLA:CPU takes it as it is instead of copying it."""
    room = np.empty(num_bytes + ALIGN_BYTES, np.uint8)
    begin = -room.ctypes.data % ALIGN_BYTES
    return room[begin : begin + num_bytes].data
