"""The seam every transfer backend implements: a Publisher on P, a Fetcher on D.

A piece is `[layers, tokens, heads, features]` of one KV group for a token range; page size never appears. P's engine thread
gathers it into a fresh device array (the *piece*), hands it to `Publisher.publish`, and never touches it again. Nothing here
blocks the engine thread: results come back as messages through `post` (the engine's inbox).

Who owns what: pages belong to the request (engine); pieces and host buffers belong to the backend from `publish`/`fetch`
until `discard`/`cancel`, which are idempotent and never wait: what a transfer thread is at work on is freed when it is through.
`num_buffered_bytes` must return to 0 when idle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax

from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.transfer.room import Taken


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """KV of tokens [begin, end), gathered on the device and padded to a bucket along the token axis."""

    begin: int
    end: int
    data: jax.Array  # kv_dtype[L, T_bucket, K, F]; tokens past end - begin are padding
    scales: jax.Array | None = None  # float32[L, T_bucket, K, 2] of int8 data: one for keys, one for values
    group: int = 0
    head_shards: int = 1  # what the receiver's mesh splits the heads into; only backends that move device arrays ask
    receiver: str = ""  # who will fetch it; a receiver that stands still must not hold up pieces of others
    taken: Taken | None = None  # the room that it takes on D's device

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """Everything that travels, in order on the wire."""
        return (self.data,) if self.scales is None else (self.data, self.scales)


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """The piece can be fetched; `ready` is what P tells D."""

    handoff: HandoffId
    ready: ChunkReady
    stays_tokens: int = 0  # as many as which it lies on the device until it is discarded


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishFailed:
    """The piece never became fetchable."""

    handoff: HandoffId
    key: str
    begin: int
    end: int
    reason: str
    backend: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceArrived:
    """Whole, its checksum (if it has one) verified, on D's devices with the pool's sharding, confirmed to be no error array."""

    handoff: HandoffId
    ready: ChunkReady
    piece: Piece
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceFailed:
    """The piece did not arrive. `reason` in {"unknown_key", "checksum", "truncated", "connection", "unreachable" (there was
    never one), "device", "stalled" (nothing came for a while), "slow" (it came, and was not here by the deadline), "timeout"
    (the deadline passed)}."""

    handoff: HandoffId
    ready: ChunkReady
    reason: str
    detail: str = ""


TransferEvent = Published | PublishFailed | PieceArrived | PieceFailed
Post = Callable[[TransferEvent], None]  # thread-safe; wakes the engine thread


class Publisher(Protocol):
    """P's half; D has one, too, for KV that it lends."""

    name: str

    def publish(self, handoff: HandoffId, key: str, piece: Piece) -> None:
        """Make `piece`, whose arrays are the publisher's from now on, fetchable under `key`; answers with Published or
        PublishFailed."""
        ...

    def discard(self, key: str) -> None:
        """Free the piece (acknowledged, stream ended, or lease over). Unknown keys are ignored."""
        ...

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes held for pieces that are published or being published."""
        ...

    def close(self) -> None:
        """Free everything and stop the threads."""
        ...


class Fetcher(Protocol):
    """D's half; P has one, too, for KV that D lends."""

    name: str

    def fetch(self, handoff: HandoffId, peer: str, ready: ChunkReady, deadline_s: float) -> None:
        """Get the piece from `peer`; answers with PieceArrived or PieceFailed by `deadline_s` (monotonic), give or take,
        later if its turn comes later, and not at all once cancelled."""
        ...

    def cancel(self, handoff: HandoffId) -> None:
        """Forget every fetch of `handoff`; events already posted may still arrive and are dropped by the engine."""
        ...

    def close(self) -> None:
        """Stop the threads."""
        ...
