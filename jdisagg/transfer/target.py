"""What a piece must look like when it reaches D's pool, and how its bytes become that.

On the wire a piece is the C-ordered bytes of `[layers, tokens, heads, features]` with exactly its tokens, in P's dtype; after
int8 data come the bytes of their scales, float32 `[layers, tokens, heads, 2]`. On D's mesh it is padded along tokens to
`chunk_tokens`, so that the scatter into the pool is one executable, and has D's dtype and sharding. Backends carry bytes, or a
piece's `arrays`, and do not know this, but for "jax": it joins and pads on the device, and makes such bytes of what it cannot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import prod

import jax
import numpy as np
import xxhash

from jdisagg.handoff.messages import ChunkReady
from jdisagg.kv.group import KVGroup
from jdisagg.kv.spec import QUANTISED, SCALE_BYTES, SCALES, KVSpec
from jdisagg.transfer.base import Piece
from jdisagg.transfer.buffers import aligned, aligned_empty
from jdisagg.transfer.convert import NP_DTYPES, convert
from jdisagg.transfer.host_copy import on_host
from jdisagg.transfer.room import Room, Taken


class PieceError(Exception):
    """One piece did not make it; `reason` is one of PieceFailed's."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, kw_only=True)
class PieceTarget:
    """Form of imported pieces of one KV group: `[num_layers, chunk_tokens, num_kv_heads, features]`."""

    sharding: jax.sharding.Sharding
    dtype: str
    chunk_tokens: int
    num_layers: int
    num_kv_heads: int
    features: int
    room: Room = field(default_factory=Room)  # for them, beside the pool

    @classmethod
    def of(
        cls, spec: KVSpec, sharding: jax.sharding.Sharding, chunk_tokens: int, *, most_tokens: int | None = None
    ) -> PieceTarget:
        """The target of pieces for a group of `spec` whose imports are sharded like `sharding`; room for `most_tokens`."""
        return cls(
            sharding=sharding,
            dtype=spec.dtype,
            chunk_tokens=chunk_tokens,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            features=spec.features,
            room=Room(most_tokens),
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[L, chunk_tokens, K, F]."""
        return self.num_layers, self.chunk_tokens, self.num_kv_heads, self.features

    def check(self, ready: ChunkReady) -> None:
        """Raise PieceError("device") when the announced piece cannot be imported here."""
        num_tokens = ready.end - ready.begin
        wanted = (self.num_layers, num_tokens, self.num_kv_heads, self.features)
        if ready.dtype not in NP_DTYPES:
            raise PieceError("device", f"dtype is {ready.dtype}, wanted one of {', '.join(NP_DTYPES)}")
        num_bytes = _num_bytes(wanted, ready.dtype)
        if ready.group != 0:
            raise PieceError("device", f"KV group is {ready.group}, wanted 0")
        if not 0 < num_tokens <= self.chunk_tokens:
            raise PieceError("device", f"piece has {num_tokens} tokens, wanted 1 to {self.chunk_tokens}")
        if tuple(ready.shape) != wanted:
            raise PieceError("device", f"shape [layers, tokens, heads, features] is {ready.shape}, wanted {wanted}")
        if ready.num_bytes != num_bytes:
            raise PieceError("device", f"announced {ready.num_bytes} bytes, wanted {num_bytes}")

    def fits(self, piece: Piece) -> bool:
        """Whether the piece's arrays need no more than to be placed."""
        return tuple(piece.data.shape) == self.shape and str(piece.data.dtype) == self.dtype

    def unpack(self, data: bytes | bytearray | memoryview, ready: ChunkReady, checksum: int = 0) -> KVGroup:
        """Checked bytes -> target.dtype[L, chunk_tokens, K, F] (and scales) in buffers nobody else holds; padding is 0.
        `checksum` is theirs, 0 = to be computed.

        Raises PieceError("truncated" | "checksum").
        """
        if len(data) != ready.num_bytes:
            raise PieceError("truncated", f"got {len(data)} bytes, wanted {ready.num_bytes}")
        if ready.checksum and (found := checksum or checksum_of(data)) != ready.checksum:
            raise PieceError("checksum", f"xxh3-64 is {found:016x}, wanted {ready.checksum:016x}")
        return jax.tree.map(self._padded, convert(_rows(data, ready), self.dtype))

    def _padded(self, rows: np.ndarray) -> np.ndarray:
        if rows.shape[1] == self.chunk_tokens:
            return rows
        padded = aligned_empty((*self.shape[:-1], rows.shape[-1]), rows.dtype)
        padded[:, : rows.shape[1]] = rows
        padded[:, rows.shape[1] :] = 0
        return padded

    def place(self, rows: KVGroup, *, alias: bool = False) -> KVGroup:
        """Put it onto D's devices and wait until it is there; raises PieceError("device"). For transfer threads only.
        `alias`: nobody else has these arrays, so that they stay where they are if that is right."""
        try:
            return jax.block_until_ready(jax.tree.map(partial(self._put, alias=alias), rows))
        except (RuntimeError, ValueError) as error:  # an error array must never reach the pool: its scatter destroys it
            raise PieceError("device", str(error)) from error

    def _put(self, rows: jax.Array | np.ndarray, *, alias: bool) -> jax.Array:
        if isinstance(rows, jax.Array):
            return jax.device_put(rows, self.sharding, may_alias=alias)
        return jax.make_array_from_callback(rows.shape, self.sharding, lambda shard: aligned(rows[shard]))

    def arrived(self, ready: ChunkReady, rows: KVGroup, taken: Taken | None = None, *, alias: bool = False) -> Piece:
        """The piece as D's engine takes it: `rows` are put onto D's devices, see `place`, in the room that was `taken`."""
        placed = self.place(rows, alias=alias)
        return Piece(begin=ready.begin, end=ready.end, data=placed.data, scales=placed.scales, group=ready.group, taken=taken)


def num_bytes_of(piece: Piece) -> int:
    """Bytes of the piece's tokens, padding left out, scales included."""
    layers, _, heads, features = piece.data.shape
    return _num_bytes((layers, piece.end - piece.begin, heads, features), str(piece.data.dtype))


def pack(piece: Piece) -> memoryview:
    """The piece's bytes as they travel, read-only, on CPU the device's own when it is full and has no scales. Waits for the
    device: for transfer threads only."""
    tokens = (on_host(array)[:, : piece.end - piece.begin] for array in piece.arrays)
    parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in tokens]
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _rows(data: bytes | bytearray | memoryview, ready: ChunkReady) -> KVGroup:
    """What `pack` made bytes of, as arrays over the same memory."""
    dtype, count = NP_DTYPES[ready.dtype], prod(ready.shape)
    rows = np.frombuffer(data, dtype, count).reshape(ready.shape)
    if ready.dtype != QUANTISED:
        return KVGroup(rows)
    scales = np.frombuffer(data, np.float32, offset=rows.nbytes)
    return KVGroup(rows, scales.reshape(*ready.shape[:-1], SCALES))


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    num_rows, features = prod(shape[:-1]), shape[-1]
    return num_rows * (features * NP_DTYPES[dtype].itemsize + (SCALE_BYTES if dtype == QUANTISED else 0))


def checksum_of(data: bytes | bytearray | memoryview) -> int:
    """xxh3-64, with 0 (= none) moved out of the way."""
    return xxhash.xxh3_64_intdigest(data) or 1


def checksum_from(hasher: xxhash.xxh3_64) -> int:
    """`checksum_of` all that `hasher` was given."""
    return hasher.intdigest() or 1


def announce(key: str, piece: Piece, checksum: int, *, backend: str = "", locator: str = "") -> ChunkReady:
    """What P tells D about a piece."""
    layers, _, heads, features = piece.data.shape
    return ChunkReady(
        key=key,
        begin=piece.begin,
        end=piece.end,
        shape=(layers, piece.end - piece.begin, heads, features),
        dtype=str(piece.data.dtype),
        num_bytes=num_bytes_of(piece),
        checksum=checksum,
        group=piece.group,
        backend=backend,
        locator=locator,
    )
