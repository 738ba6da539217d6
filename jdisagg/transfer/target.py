"""What a piece must look like when it reaches D's pool, and how its bytes become that.

On the wire a piece is the C-ordered bytes of `[layers, tokens, heads, features]` with exactly its tokens, in P's dtype. On
D's mesh it is padded along tokens to `chunk_tokens`, so that the scatter into the pool is one executable, and has D's dtype
and sharding.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np
import xxhash

from jdisagg.handoff.messages import ChunkReady
from jdisagg.kv.spec import KVSpec
from jdisagg.transfer.base import Piece

_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


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

    @classmethod
    def of(cls, spec: KVSpec, sharding: jax.sharding.Sharding, chunk_tokens: int) -> PieceTarget:
        """The target of pieces for a group of `spec` whose imports are sharded like `sharding`."""
        return cls(
            sharding=sharding,
            dtype=spec.dtype,
            chunk_tokens=chunk_tokens,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            features=spec.features,
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[L, chunk_tokens, K, F]."""
        return self.num_layers, self.chunk_tokens, self.num_kv_heads, self.features

    def check(self, ready: ChunkReady) -> None:
        """Raise PieceError("device") when the announced piece cannot be imported here."""
        num_tokens = ready.end - ready.begin
        wanted = (self.num_layers, num_tokens, self.num_kv_heads, self.features)
        if ready.dtype not in _DTYPES:
            raise PieceError("device", f"dtype is {ready.dtype}, wanted one of {', '.join(_DTYPES)}")
        num_bytes = int(np.prod(wanted)) * _DTYPES[ready.dtype].itemsize
        if ready.group != 0:
            raise PieceError("device", f"KV group is {ready.group}, wanted 0")
        if not 0 < num_tokens <= self.chunk_tokens:
            raise PieceError("device", f"piece has {num_tokens} tokens, wanted 1 to {self.chunk_tokens}")
        if tuple(ready.shape) != wanted:
            raise PieceError("device", f"shape [layers, tokens, heads, features] is {ready.shape}, wanted {wanted}")
        if ready.num_bytes != num_bytes:
            raise PieceError("device", f"announced {ready.num_bytes} bytes, wanted {num_bytes}")

    def unpack(self, data: bytes | bytearray, ready: ChunkReady) -> np.ndarray:
        """Checked bytes -> target.dtype[L, chunk_tokens, K, F] in a buffer nobody else holds; padding is 0.

        Raises PieceError("truncated" | "checksum").
        """
        if len(data) != ready.num_bytes:
            raise PieceError("truncated", f"got {len(data)} bytes, wanted {ready.num_bytes}")
        if ready.checksum and checksum_of(data) != ready.checksum:
            raise PieceError("checksum", f"xxh3-64 is {checksum_of(data):016x}, wanted {ready.checksum:016x}")
        tokens = np.frombuffer(data, _DTYPES[ready.dtype]).reshape(ready.shape)
        padded = np.zeros(self.shape, _DTYPES[self.dtype])
        padded[:, : ready.end - ready.begin] = tokens.astype(padded.dtype, copy=False)
        return padded

    def place(self, array: np.ndarray | jax.Array) -> jax.Array:
        """Copy onto D's devices and wait until it is there; raises PieceError("device"). For transfer threads only."""
        try:
            return jax.block_until_ready(jax.device_put(array, self.sharding, may_alias=False))
        except (RuntimeError, ValueError) as error:  # an error array must never reach the pool: its scatter destroys it
            raise PieceError("device", str(error)) from error


def num_bytes_of(piece: Piece) -> int:
    """Bytes of the piece's tokens, padding left out."""
    layers, _, heads, features = piece.data.shape
    return layers * (piece.end - piece.begin) * heads * features * piece.data.dtype.itemsize


def pack(piece: Piece) -> bytes:
    """The piece's bytes as they travel. Waits for the device: for transfer threads only."""
    return np.asarray(piece.data)[:, : piece.end - piece.begin].tobytes()


def checksum_of(data: bytes | bytearray) -> int:
    """xxh3-64, with 0 (= none) moved out of the way."""
    return xxhash.xxh3_64_intdigest(data) or 1


def announce(key: str, piece: Piece, checksum: int) -> ChunkReady:
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
    )
