"""Pieces that travel as bytes through host memory: what the backends "grpc", "shm" and "tcp" share.

    P's engine   publish -> lane: device to host, trim, checksum -> ByteStore -> Published(key, locator)
    D's engine   fetch -> lane of the peer: ByteSource.read_into, verify, pad, device_put, confirm -> PieceArrived

A backend is a store on P and a source on D that reads what the store holds; the locator is their secret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic
from typing import Protocol

import xxhash

from jdisagg.core.errors import NeverConnected, Stalled
from jdisagg.handoff.messages import ChunkReady
from jdisagg.transfer.base import Piece, Post
from jdisagg.transfer.buffers import Buffers
from jdisagg.transfer.lanes import FetchJob, LaneFetcher
from jdisagg.transfer.publisher import LanePublisher
from jdisagg.transfer.target import PieceError, PieceTarget, announce, checksum_from, checksum_of, pack

STALL_S = 1.0  # a read that had as long, and got nothing, did not just come late


class ByteStore(Protocol):
    """P's bytes by key; all three are called from the publisher's thread."""

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

    def read_into(self, peer: str, key: str, room: memoryview, deadline_s: float) -> Iterator[int]:
        """Fill `room` from its start with the piece that `key` (or its locator) names, ending before `deadline_s` (monotonic);
        yields how many bytes were added, part by part, while they are still in the processor's cache.

        Raises KeyError when the peer has no such piece, BufferError when it is longer than `room`, TimeoutError at the
        deadline, Stalled when nothing came for long before it, NeverConnected when nobody accepts a connection, OSError
        (ConnectionError) for everything else.
        """
        ...


def host_publisher(name: str, store: ByteStore, post: Post, *, checksums: bool = True) -> LanePublisher:
    """P's half; `checksums=False` saves the hash on trusted networks."""
    return LanePublisher(name, _Copies(name, store, checksums=checksums), post)


class _Copies:
    """Pieces as bytes of host memory, in a ByteStore."""

    def __init__(self, name: str, store: ByteStore, *, checksums: bool) -> None:
        self._name = name
        self._store = store
        self._checksums = checksums

    def put(self, key: str, piece: Piece) -> tuple[ChunkReady, int]:
        data = pack(piece)
        locator = self._store.put(key, data)
        checksum = checksum_of(data) if self._checksums else 0
        return announce(key, piece, checksum, backend=self._name, locator=locator), 0

    def discard(self, key: str) -> None:
        self._store.discard(key)

    def close(self) -> None:
        self._store.close()


def host_fetcher(
    name: str,
    source: ByteSource,
    target: PieceTarget,
    post: Post,
    buffers: Buffers | None = None,
    *,
    on_end: Callable[[str], None] = lambda peer: None,
) -> LaneFetcher:
    """D's half. Before closing it, close a source whose reads may be waiting on a dead peer. Pieces land in `buffers`, which
    several may share. `on_end(peer)`: nothing was read from the peer for a while."""
    reads = _Reads(source, target, buffers or Buffers())
    return LaneFetcher(name, reads.obtain, post, on_end=on_end)


class _Reads:
    """Pieces out of a ByteSource. A cancelled read stops at its next part."""

    def __init__(self, source: ByteSource, target: PieceTarget, buffers: Buffers) -> None:
        self._source = source
        self._target = target
        self._buffers = buffers

    def obtain(self, job: FetchJob) -> Piece:
        self._target.check(job.ready)
        data, checksum = self._read(job)
        rows = self._target.unpack(data, job.ready, checksum)
        return self._target.arrived(job.ready, rows, job.await_room(self._target.room, self._target.chunk_tokens))

    def _read(self, job: FetchJob) -> tuple[memoryview, int]:
        """What arrived, and its checksum if one was announced."""
        ready, hasher, filled, began_s = job.ready, xxhash.xxh3_64(), 0, monotonic()
        room = self._buffers.take(ready.num_bytes)
        try:
            for count in self._source.read_into(job.peer, ready.locator or ready.key, room, job.deadline_s):
                if job.cancelled:
                    raise PieceError("connection", "cancelled")
                if ready.checksum:
                    hasher.update(room[filled : filled + count])
                filled += count
        except KeyError as error:
            raise PieceError("unknown_key", str(error)) from error
        except BufferError as error:
            raise PieceError("truncated", str(error)) from error
        except Stalled as error:
            raise PieceError("stalled", str(error)) from error
        except TimeoutError as error:
            nothing = "stalled" if monotonic() - began_s >= STALL_S else "timeout"
            raise PieceError("slow" if filled else nothing, str(error)) from error
        except NeverConnected as error:
            raise PieceError("unreachable", str(error)) from error
        except OSError as error:  # also what the system says that has no descriptor left
            raise PieceError("connection", str(error)) from error
        return room[:filled], checksum_from(hasher) if ready.checksum else 0
