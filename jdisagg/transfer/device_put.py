"""Backend "device_put": prefill mesh and decode mesh in one process; pieces go from device to device.

A published piece stays on P's mesh until it is discarded; a fetch copies it onto D's mesh on a transfer thread, because a
device_put between meshes of different size blocks its caller. Dropping the source after the copy was started is safe. There are
no bytes to check: `checksum` is 0.
"""

from __future__ import annotations

from functools import partial

from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.kv.group import KVGroup
from jdisagg.transfer.base import Piece, Post, Published
from jdisagg.transfer.lanes import FetchJob, LaneFetcher
from jdisagg.transfer.target import PieceError, PieceTarget, announce, num_bytes_of, pack


class DevicePutPublisher:
    """P's half. P's engine thread writes, D's transfer thread reads: single dict operations only."""

    name = "device_put"

    def __init__(self, post: Post) -> None:
        self._post = post
        self._pieces: dict[str, Piece] = {}  # from publish to discard

    def publish(self, handoff: HandoffId, key: str, piece: Piece) -> None:
        """Fetchable at once; the gather may still run, the fetch waits for it."""
        assert piece.begin < piece.end, f"piece [{piece.begin}, {piece.end}) of {handoff} is empty"
        self._pieces[key] = piece
        ready = announce(key, piece, checksum=0, backend=self.name)
        self._post(Published(handoff=handoff, ready=ready, stays_tokens=piece.data.shape[1]))

    def get(self, key: str) -> Piece | None:
        """The piece, or None. Any thread."""
        return self._pieces.get(key)

    def discard(self, key: str) -> None:
        """Drop the piece; unknown keys are ignored."""
        self._pieces.pop(key, None)

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes of the published pieces' tokens."""
        return sum(num_bytes_of(piece) for piece in list(self._pieces.values()))

    def close(self) -> None:
        """Drop everything."""
        self._pieces.clear()


def device_put_fetcher(publisher: DevicePutPublisher, target: PieceTarget, post: Post, example: KVGroup) -> LaneFetcher:
    """D's half. Copies `example`, arrays that lie like P's pieces, at once: one device to many compiles a slicing program."""
    target.place(example)
    return LaneFetcher("device_put", partial(_obtain, publisher, target), post)


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
