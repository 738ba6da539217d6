"""Cutting a piece for another mesh and joining it there, on the device, with a checksum of what travels.

A piece `[L, T, K, F]` (and its scales, `[L, T, K, 2]`) is cut into `num_parts` along heads, so many that every part lies on
one device of P and goes to one device of D, and trimmed along tokens to the smallest of a few lengths. What travels are the
slabs of the parts. A full piece between meshes that hold heads alike, with parts of one slab, is neither cut nor joined nor
copied: its own arrays travel. All functions are compiled by `warm_up`; nothing compiles later.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice
from math import lcm
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.transfer.head_mesh import HEADS, HeadMesh
from jdisagg.transfer.slabs import Shape, join_slabs, slabs_of
from jdisagg.transfer.sums import PartSums, SumKind

MAX_PARTS = 8  # beyond it only as many as either mesh has


def token_buckets(chunk_tokens: int) -> tuple[int, ...]:
    """Lengths a piece is trimmed to, ascending."""
    return tuple(sorted({max(1, chunk_tokens // 16), max(1, chunk_tokens // 4), chunk_tokens}))


def possible_parts(shards: int, num_heads: int) -> tuple[int, ...]:
    """Every number of parts a mesh with `shards` may be asked for."""
    limit = max(MAX_PARTS, shards)
    return tuple(n for n in range(shards, limit + 1, shards) if num_heads % n == 0)


class Cutter:
    """P's half, for pieces like `example`."""

    def __init__(self, example: Sequence[jax.Array], *, checksums: bool) -> None:
        self.mesh = HeadMesh(example[0].sharding, example[0].shape)
        self._example = example
        self._num_heads, self._chunk_tokens = example[0].shape[HEADS], example[0].shape[1]
        self._buckets = token_buckets(self._chunk_tokens)
        shards = [self.mesh.local(array)[0] for array in example]
        self._is_slab = all(len(slabs_of(shard.shape, shard.dtype)) == 1 for shard in shards)
        self._cut = self.mesh.jit(_cut_shard, "num_parts", "num_tokens")
        self._sums = PartSums(self.mesh)
        self.sum_kind = self._sums.native if checksums else SumKind.NONE

    def warm_up(self) -> int:
        """Compile and run everything; returns how many functions."""
        wanted = [(n, t) for n in possible_parts(self.mesh.num_shards, self._num_heads) for t in self._buckets]
        for num_parts, num_tokens in wanted:
            self._cut_parts(self._whole(self._example), num_parts, num_tokens, num_tokens)
            self.cut(self._example, num_parts, num_tokens)
        return len(wanted)

    def num_parts(self, receiver_shards: int) -> int:
        """Parts for a receiver whose mesh holds heads in `receiver_shards`; only numbers that `warm_up` has seen."""
        common = lcm(self.mesh.num_shards, receiver_shards)
        return common if common in possible_parts(self.mesh.num_shards, self._num_heads) else self.mesh.num_shards

    def padded(self, num_tokens: int) -> int:
        """The length to which `cut` trims a piece of so many tokens."""
        return next(bucket for bucket in self._buckets if bucket >= num_tokens)

    def cut(self, arrays: Sequence[jax.Array], num_parts: int, num_tokens: int) -> tuple[list[jax.Array], int]:
        """Slabs in order of (array, head, slab), together at least `num_tokens` long, and their checksum. Waits for the
        device. Those of a full piece may be its own memory."""
        whole = self._whole(arrays)
        if num_parts == self.mesh.num_shards and num_tokens == self._chunk_tokens and self._is_slab:
            slices = [(array,) for array in whole]
        else:
            slices = self._cut_parts(whole, num_parts, num_tokens, self.padded(num_tokens))
        slabs = [self.mesh.parts(of_array) for of_array in slices]
        jax.block_until_ready(slabs)
        return [slab for of_array in slabs for slab in of_array], self._sums.of(slabs, self.sum_kind)

    def _whole(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return [self.mesh.whole(self.mesh.local(array)) for array in arrays]

    def _cut_parts(self, whole: Sequence[jax.Array], num_parts: int, num_tokens: int, bucket: int) -> Any:
        return self._cut(np.int32(num_tokens), *whole, num_parts=num_parts // self.mesh.num_shards, num_tokens=bucket)


class Joiner:
    """D's half, for pieces that become arrays like `shapes` and `dtypes` with `sharding`."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any], sharding: jax.sharding.Sharding) -> None:
        self.mesh = HeadMesh(sharding, shapes[0])
        self._shapes = shapes
        self._dtypes = dtypes
        self._chunk_tokens = shapes[0][1]
        self._buckets = token_buckets(self._chunk_tokens)
        self._join = self.mesh.jit(_join_shard, "shapes", "num_parts", "chunk_tokens")
        self._sums = PartSums(self.mesh)
        self._known: set[tuple[int, int]] = set()  # (parts, tokens) that are compiled

    def warm_up(self) -> int:
        """Compile and run everything; returns how many functions."""
        num_heads = self._shapes[0][HEADS]
        wanted = [(n, t) for n in possible_parts(self.mesh.num_shards, num_heads) for t in self._buckets]
        for num_parts, num_tokens in wanted:
            self._known.add((num_parts, num_tokens))
            slabs = [jnp.zeros(spec.shape, spec.dtype, device=spec.sharding) for spec in self.specs(num_parts, num_tokens)]
            self.join(slabs, num_parts, num_tokens, self._sums.native)
        return len(wanted)

    def knows(self, num_parts: int, num_tokens: int) -> bool:
        """Whether such a piece can be joined without compiling anything."""
        return (num_parts, num_tokens) in self._known

    def devices(self, num_parts: int) -> list[Any]:
        """Where each part of an array goes; the first device for parts that are wider than a shard."""
        per_shard, odd = divmod(num_parts, self.mesh.num_shards)
        if odd:
            return [self.mesh.devices[0]] * num_parts
        return [device for device in self.mesh.devices for _ in range(per_shard)]

    def specs(self, num_parts: int, num_tokens: int) -> list[jax.ShapeDtypeStruct]:
        """What `join` takes."""
        return [
            jax.ShapeDtypeStruct(slab.shape(part), dtype, sharding=jax.sharding.SingleDeviceSharding(device))
            for part, dtype in zip(self.part_shapes(num_parts, num_tokens), self._dtypes, strict=True)
            for device in self.devices(num_parts)
            for slab in slabs_of(part, dtype)
        ]

    def part_shapes(self, num_parts: int, num_tokens: int) -> tuple[Shape, ...]:
        """Of a part of each array."""
        return tuple((layers, num_tokens, heads // num_parts, features) for layers, _, heads, features in self._shapes)

    def by_array(self, slabs: Sequence[Any], num_parts: int, num_tokens: int) -> list[Sequence[Any]]:
        """What `specs` described, array by array."""
        shapes = self.part_shapes(num_parts, num_tokens)
        counts = [num_parts * len(slabs_of(part, dtype)) for part, dtype in zip(shapes, self._dtypes, strict=True)]
        ends = list(accumulate(counts))
        return [slabs[end - count : end] for count, end in zip(counts, ends, strict=True)]

    def is_whole(self, num_parts: int, num_tokens: int) -> bool:
        """Whether the arrays come as they are, one slab for each shard: what came is their memory."""
        parts = zip(self.part_shapes(num_parts, num_tokens), self._dtypes, strict=True)
        is_slab = all(len(slabs_of(part, dtype)) == 1 for part, dtype in parts)
        return is_slab and num_parts == self.mesh.num_shards and num_tokens == self._chunk_tokens

    def join(self, slabs: Sequence[jax.Array], num_parts: int, num_tokens: int, kind: SumKind) -> tuple[list[jax.Array], int]:
        """The arrays, padded with zeros, on the devices of `mesh`, and the slabs' checksum of this `kind`. Waits. Arrays that
        came whole are the slabs' memory."""
        of_arrays = self.by_array(slabs, num_parts, num_tokens)
        slices = [self.mesh.slices(of_array) for of_array in of_arrays]
        if self.is_whole(num_parts, num_tokens):
            arrays = [of_array[0] for of_array in slices]
        else:
            flat = [one for of_array in slices for one in of_array]
            shapes = self.part_shapes(num_parts, num_tokens)
            per_shard = num_parts // self.mesh.num_shards
            arrays = list(self._join(*flat, shapes=shapes, num_parts=per_shard, chunk_tokens=self._chunk_tokens))
        return jax.block_until_ready(arrays), self._sums.of(of_arrays, kind)

    def join_on_host(self, slabs: Sequence[np.ndarray], num_parts: int, num_tokens: int) -> list[np.ndarray]:
        """The arrays as numbers of the host, `num_tokens` long."""
        arrays, shapes = [], self.part_shapes(num_parts, num_tokens)
        for of_array, shape in zip(self.by_array(slabs, num_parts, num_tokens), shapes, strict=True):
            per_part = len(of_array) // num_parts
            parts = [of_array[begin : begin + per_part] for begin in range(0, len(of_array), per_part)]
            arrays.append(np.concatenate([join_slabs(part, shape, np) for part in parts], axis=HEADS))
        return arrays


def _cut_shard(length: jax.Array, *arrays: jax.Array, num_parts: int, num_tokens: int) -> Any:
    is_token = (jnp.arange(num_tokens, dtype=jnp.int32) < length)[None, :, None, None]  # padding is nobody's business
    trimmed = [jnp.where(is_token, array[:, :num_tokens], jnp.zeros((), array.dtype)) for array in arrays]
    parts = [jnp.split(array, num_parts, axis=HEADS) for array in trimmed]
    return tuple(tuple(slab.of(part) for part in of_array for slab in slabs_of(part.shape, part.dtype)) for of_array in parts)


def _join_shard(*slabs: jax.Array, shapes: tuple[Shape, ...], num_parts: int, chunk_tokens: int) -> Any:
    """`num_parts` parts of each array, of these `shapes`."""
    arrays, rest = [], iter(slabs)
    for shape in shapes:
        parts: list[jax.Array] = []
        for _ in range(num_parts):
            first = next(rest)
            num_more = len(slabs_of(shape, first.dtype)) - 1
            parts.append(join_slabs([first, *islice(rest, num_more)], shape, jnp))
        whole = jnp.concatenate(parts, axis=HEADS)
        padding = [(0, 0), (0, chunk_tokens - whole.shape[1]), (0, 0), (0, 0)]
        arrays.append(jnp.pad(whole, padding))
    return tuple(arrays)
