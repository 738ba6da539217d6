"""Backend "device_put": prefill mesh and decode mesh in one process; pieces go from device to device.

A piece is announced when the device has made it, and stays on P's mesh until it is discarded; a fetch copies it onto D's mesh
on a transfer thread, because a device_put between meshes of different size blocks its caller. Dropping the source after the
copy was started is safe. There are no bytes to check: `checksum` is 0.
"""

from __future__ import annotations

from functools import partial

import jax

from jdisagg.handoff.messages import ChunkReady
from jdisagg.kv.group import KVGroup
from jdisagg.transfer.base import Piece, Post
from jdisagg.transfer.lanes import FetchJob, LaneFetcher
from jdisagg.transfer.publisher import LanePublisher
from jdisagg.transfer.target import PieceError, PieceTarget, announce, pack

NAME = "device_put"


class DevicePutPublisher(LanePublisher):
    """P's half. What is discarded leaves the device at once, also while the lane waits for steps behind it."""

    def __init__(self, post: Post) -> None:
        self._made = _Made()
        super().__init__(NAME, self._made, post)

    def get(self, key: str) -> Piece | None:
        """The piece, or None. Any thread."""
        return self._made.pieces.get(key)

    def discard(self, key: str) -> None:
        """Drop the piece; unknown keys are ignored."""
        super().discard(key)  # first: one that is put meanwhile is found by the lane
        self._made.discard(key)


class _Made:
    """Pieces that the device has made. P's threads write, D's transfer thread reads: single dict operations only."""

    def __init__(self) -> None:
        self.pieces: dict[str, Piece] = {}  # from put to discard

    def put(self, key: str, piece: Piece) -> tuple[ChunkReady, int]:
        """D has a clock for every piece that it was told of, which is for the copy, not for the steps before the gather."""
        jax.block_until_ready(piece.arrays)
        self.pieces[key] = piece
        return announce(key, piece, checksum=0, backend=NAME), piece.data.shape[1]

    def discard(self, key: str) -> None:
        self.pieces.pop(key, None)

    def close(self) -> None:
        self.pieces.clear()


def device_put_fetcher(publisher: DevicePutPublisher, target: PieceTarget, post: Post, example: KVGroup) -> LaneFetcher:
    """D's half. Copies `example`, arrays that lie like P's pieces, at once: one device to many compiles a slicing program."""
    target.place(example)
    return LaneFetcher(NAME, partial(_obtain, publisher, target), post)


def _obtain(publisher: DevicePutPublisher, target: PieceTarget, job: FetchJob) -> Piece:
    ready, taken = job.ready, job.await_room(target.room, target.chunk_tokens)  # before P's piece is held here
    piece = publisher.get(ready.key)
    if piece is None:
        raise PieceError("unknown_key", f"no piece {ready.key!r} here: acknowledged, or its lease is over")
    target.check(ready)
    rows = KVGroup(piece.data, piece.scales) if target.fits(piece) else _reshaped(piece, target, ready)
    return target.arrived(ready, rows, taken)


def _reshaped(piece: Piece, target: PieceTarget, ready: ChunkReady) -> KVGroup:
    """Another chunk size or dtype: through the host, where nothing compiles."""
    try:
        data = pack(piece)
    except RuntimeError as error:
        raise PieceError("device", str(error)) from error
    return target.unpack(data, ready)
