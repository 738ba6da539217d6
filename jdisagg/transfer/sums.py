"""The checksum of a piece that travels as arrays: one of each part, combined in the order of (array, head).

    host      xxh3-64 of the part's bytes. For parts in memory that the processor reads at full speed: XLA:CPU's.
    device    computed where the part lies. It sees every bit and its place: with m(i) = mix(bits of element i + i * odd) it is
              the pair (sum of m(i), sum of m(i) * (2 i + 1)) modulo 2^32. `mix` is the finalizer of MurmurHash3 (Appleby,
              public domain), a bijection, so one changed element always changes the first sum.

P chooses by what it runs on and says which; D computes the same, by the slower way if it runs on something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from jdisagg.transfer.head_mesh import HeadMesh

_GOLDEN = np.uint32(0x9E3779B1)
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_LOW = 0xFFFFFFFF


class SumKind(StrEnum):
    """How; as it travels in a locator."""

    NONE = "none"
    HOST = "host"
    DEVICE = "device"


class PartSums:
    """Checksums of parts on the devices of `mesh`."""

    def __init__(self, mesh: HeadMesh) -> None:
        self._mesh = mesh
        self.native = SumKind.HOST if mesh.devices[0].platform == "cpu" else SumKind.DEVICE
        self._sum = mesh.jit(_sums_of_shard, per_shard=True)

    def of(self, arrays: Sequence[Sequence[jax.Array]], kind: SumKind) -> int:
        """One number from 1 to 2^64 - 1 for the parts of each array in the order of heads; 0 for none. Waits."""
        if kind is SumKind.NONE:
            return 0
        if kind is not self.native or kind is SumKind.HOST:
            return sum_on_host([np.asarray(part) for parts in arrays for part in parts], kind)
        by_shard = np.asarray(self._sum(*(one for parts in arrays for one in self._mesh.slices(parts))))
        in_order = by_shard.reshape(self._mesh.num_shards, len(arrays), -1, 2).transpose(1, 0, 2, 3)
        return _combine(in_order.reshape(-1, 2).tolist())


def sum_on_host(parts: Sequence[np.ndarray], kind: SumKind) -> int:
    """What PartSums gives, of parts in the order of (array, head)."""
    if kind is SumKind.HOST:
        found = (xxhash.xxh3_64_intdigest(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data) for part in parts)
        return _combine([(value & _LOW, value >> 32) for value in found])
    with np.errstate(over="ignore"):
        return _combine([_pair(part, np).tolist() for part in parts])


def _combine(pairs: Sequence[Sequence[int]]) -> int:
    low = high = 0
    for index, (first, second) in enumerate(pairs):
        low = (low * 0x01000193 + first + index) & _LOW
        high = (high * 0x01000193 + second + index) & _LOW
    return (high << 32 | low) or 1


def _sums_of_shard(*parts: jax.Array) -> jax.Array:
    """u32[1, parts, 2]."""
    return jnp.stack([_pair(part, jnp) for part in parts])[None]


def _pair(part: Any, np_: Any) -> Any:
    """u32[2] of one part, by numpy or jax.numpy."""
    bits = _BITS[part.dtype.itemsize]
    flat = (part.view(bits) if np_ is np else jax.lax.bitcast_convert_type(part, bits)).astype(np.uint32).reshape(-1)
    index = np_.arange(flat.size, dtype=np.uint32)
    mixed = _mix(flat + index * _GOLDEN)
    weighted = mixed * (index * np.uint32(2) + np.uint32(1))
    return np_.stack([np_.sum(mixed, dtype=np.uint32), np_.sum(weighted, dtype=np.uint32)])


def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
