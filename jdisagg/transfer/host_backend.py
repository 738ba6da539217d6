"""Pieces that travel as bytes through host memory: what the backends "grpc", "shm" and "tcp" share.

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
from jdisagg.transfer.room import Room
from jdisagg.transfer.target import PieceError, PieceTarget, announce, checksum_of, num_bytes_of, pack

log = logging.getLogger(__name__)

ALIGN_BYTES = 64


class ByteStore(Protocol):
    """P's bytes by key. `put` is called from the publisher's thread, `discard` from both, `close` when that thread is over."""

    def put(self, key: str, data: memoryview) -> str:
        """Store the bytes; returns what the source needs beside the key, "" = nothing. Raises OSError and MemoryError."""
        ...

    def discard(self, key: str) -> None:
        """Free the piece; unknown keys are ignored."""
        ...

    def close(self) -> None:
        """Free everything; idempotent."""
        ...


class ByteSource(Protocol):
    """D's way to the bytes of a peer's pieces; called from transfer threads."""

    def read(self, peer: str, key: str, deadline_s: float) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the piece that `key` (or its locator) names, in order, ending before `deadline_s` (monotonic);
        a part is the reader's until it asks for the next.

        Raises KeyError when the peer has no such piece, TimeoutError at the deadline, ConnectionError for everything else.
        """
        ...


class HostPublisher:
    """P's half. Holds at most `max_bytes`, or a single larger piece; `checksums=False` saves the hash on trusted networks."""

    def __init__(self, name: str, store: ByteStore, post: Post, *, max_bytes: int, checksums: bool = True) -> None:
        self.name = name
        self._store = store
        self._room = Room(max_bytes)
        self._post = post
        self._checksums = checksums
        self._lane = Lane(f"{name}-publish")

    def publish(self, handoff: HandoffId, key: str, piece: Piece) -> None:
        """Copy the piece to the host on the transfer thread; answers Published or PublishFailed, nothing once discarded."""
        assert piece.begin < piece.end, f"piece [{piece.begin}, {piece.end}) of {handoff} is empty"
        if not self._room.take(key, num_bytes_of(piece)):
            self._fail(handoff, key, piece, "buffer_full")
            return
        self._lane.submit(lambda: self._copy(handoff, key, piece))

    def _copy(self, handoff: HandoffId, key: str, piece: Piece) -> None:
        if key not in self._room:
            return
        try:
            data = pack(piece)
            locator = self._store.put(key, data)
        except (RuntimeError, ValueError, MemoryError, OSError) as error:
            log.warning("%s: publishing piece [%d, %d) of %s: %s", self.name, piece.begin, piece.end, handoff, error)
            self.discard(key)
            self._fail(handoff, key, piece, f"device: {error}")
            return
        if key not in self._room:
            self._store.discard(key)
            return
        checksum = checksum_of(data) if self._checksums else 0
        self._post(Published(handoff=handoff, ready=announce(key, piece, checksum, backend=self.name, locator=locator)))

    def _fail(self, handoff: HandoffId, key: str, piece: Piece, reason: str) -> None:
        self._post(PublishFailed(handoff=handoff, key=key, begin=piece.begin, end=piece.end, reason=reason, backend=self.name))

    def discard(self, key: str) -> None:
        """Free the bytes."""
        self._room.free(key)
        self._store.discard(key)

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes held for pieces that are published or being published."""
        return self._room.num_bytes

    def close(self) -> None:
        """Free everything and end the thread."""
        for key in self._room.keys:
            self.discard(key)
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
