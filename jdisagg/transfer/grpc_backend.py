"""Backend "grpc": pieces travel as bytes through host memory. Works between any two processes.

    P's engine   publish -> lane: device to host, trim, checksum -> PieceStore -> Published
    P's server   PeerService.Fetch reads PieceStore.get(key)
    D's engine   fetch -> lane of the peer: ByteSource.read, verify, pad, device_put, confirm -> PieceArrived

The store is shared by three threads without a lock: each operation on it is one dict operation, and `put` looks again after
it stored, so a piece discarded meanwhile leaves nothing behind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Protocol

from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.transfer.base import Piece, Post, Published, PublishFailed
from jdisagg.transfer.lanes import CLOSE_TIMEOUT_S, FetchJob, FetchLanes, Lane
from jdisagg.transfer.target import PieceError, PieceTarget, announce, checksum_of, num_bytes_of, pack

log = logging.getLogger(__name__)


class ByteSource(Protocol):
    """D's way to the bytes of a peer's pieces; called from transfer threads."""

    def read(self, peer: str, key: str, deadline_s: float) -> Iterator[bytes]:
        """Yield the piece's bytes in order, ending before `deadline_s` (monotonic).

        Raises KeyError when the peer has no such piece, TimeoutError at the deadline, ConnectionError for everything else.
        """
        ...


class PieceStore:
    """Bytes of published pieces by key, at most `max_bytes` (a single larger piece is taken when the store is empty)."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: dict[str, int] = {}  # from reserve to discard
        self._bytes: dict[str, bytes] = {}  # from put to discard

    def reserve(self, key: str, num_bytes: int) -> bool:
        """Take room for a piece whose bytes come later; False when there is none."""
        used = self.num_bytes
        if used and used + num_bytes > self._max_bytes:
            return False
        self._sizes[key] = num_bytes
        return True

    def put(self, key: str, data: bytes) -> bool:
        """Store the bytes of a reserved piece; False when it was discarded meanwhile."""
        self._bytes[key] = data
        if key in self._sizes:
            return True
        self._bytes.pop(key, None)
        return False

    def get(self, key: str) -> bytes | None:
        """The bytes, or None when the piece is unknown, not there yet, or discarded. Any thread."""
        return self._bytes.get(key)

    def discard(self, key: str) -> None:
        """Free the piece; unknown keys are ignored."""
        self._sizes.pop(key, None)
        self._bytes.pop(key, None)

    def clear(self) -> None:
        """Free everything."""
        self._sizes.clear()
        self._bytes.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes reserved."""
        return sum(list(self._sizes.values()))


class GrpcPublisher:
    """P's half. `checksums=False` saves the hash where the network is trusted."""

    name = "grpc"

    def __init__(self, store: PieceStore, post: Post, *, checksums: bool = True) -> None:
        self._store = store
        self._post = post
        self._checksums = checksums
        self._lane = Lane("grpc-publish")

    def publish(self, handoff: HandoffId, key: str, piece: Piece) -> None:
        """Copy the piece to the host on the transfer thread; answers Published or PublishFailed, nothing once discarded."""
        assert piece.begin < piece.end, f"piece [{piece.begin}, {piece.end}) of {handoff} is empty"
        if not self._store.reserve(key, num_bytes_of(piece)):
            self._fail(handoff, piece, "buffer_full")
            return
        self._lane.submit(lambda: self._copy(handoff, key, piece))

    def _copy(self, handoff: HandoffId, key: str, piece: Piece) -> None:
        try:
            data = pack(piece)
        except (RuntimeError, ValueError, MemoryError) as error:
            log.warning("publishing piece [%d, %d) of %s: %s", piece.begin, piece.end, handoff, error)
            self._store.discard(key)
            self._fail(handoff, piece, f"device: {error}")
            return
        if self._store.put(key, data):
            ready = announce(key, piece, checksum_of(data) if self._checksums else 0)
            self._post(Published(handoff=handoff, ready=ready))

    def _fail(self, handoff: HandoffId, piece: Piece, reason: str) -> None:
        self._post(PublishFailed(handoff=handoff, begin=piece.begin, end=piece.end, reason=reason))

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
        self._store.clear()


class GrpcFetcher:
    """D's half."""

    name = "grpc"

    def __init__(self, source: ByteSource, target: PieceTarget, post: Post) -> None:
        self._source = source
        self._target = target
        self._lanes = FetchLanes("grpc-fetch", self._obtain, post)

    def fetch(self, handoff: HandoffId, peer: str, ready: ChunkReady, deadline_s: float) -> None:
        """Get the piece on the peer's lane."""
        self._lanes.fetch(handoff, peer, ready, deadline_s)

    def cancel(self, handoff: HandoffId) -> None:
        """Drop the fetches of `handoff`; one under way stops at its next part."""
        self._lanes.cancel(handoff)

    def close(self) -> None:
        """End the threads. Close the byte source first if reads may be waiting on a dead peer."""
        self._lanes.close()

    def _obtain(self, job: FetchJob) -> Piece:
        self._target.check(job.ready)
        return self._target.arrived(job.ready, self._target.unpack(self._read(job), job.ready))

    def _read(self, job: FetchJob) -> bytearray:
        data = bytearray()  # a buffer of this piece alone: device_put may alias it
        try:
            for part in self._source.read(job.peer, job.ready.key, job.deadline_s):
                data += part
                if job.cancelled:
                    raise PieceError("connection", "cancelled")
                if len(data) > job.ready.num_bytes:
                    raise PieceError("truncated", f"got more than the announced {job.ready.num_bytes} bytes")
        except KeyError as error:
            raise PieceError("unknown_key", str(error)) from error
        except TimeoutError as error:
            raise PieceError("timeout", str(error)) from error
        except ConnectionError as error:
            raise PieceError("connection", str(error)) from error
        return data
