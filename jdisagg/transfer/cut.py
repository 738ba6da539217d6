"""Cutting a piece for another mesh and joining it there, on the device, with a checksum of what travels.

A piece `[L, T, K, F]` (and its scales, `[L, T, K, 2]`) is cut into `num_parts` along heads, so many that every part lies on
one device of P and goes to one device of D, and trimmed along tokens to the smallest of a few lengths. All functions are
compiled by `warm_up`; nothing compiles later.

The checksum of a part sees every bit and its place: with m(i) = mix(bits of element i + i * odd) it is the pair
(sum of m(i), sum of m(i) * (2 i + 1)) modulo 2^32. `mix` is the finalizer of MurmurHash3 (Appleby, public domain), a
bijection, so one changed element always changes the first sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

HEADS = 2  # axis of a piece
MAX_PARTS = 8  # beyond it only as many as either mesh has
_AXIS = "shard"
_GOLDEN = np.uint32(0x9E3779B1)
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def token_buckets(chunk_tokens: int) -> tuple[int, ...]:
    """Lengths a piece is trimmed to, ascending."""
    return tuple(sorted({max(1, chunk_tokens // 16), max(1, chunk_tokens // 4), chunk_tokens}))


def num_parts_for(ours: int, theirs: int, num_heads: int) -> int:
    """Parts of a piece between a mesh that holds heads in `ours` shards and one that holds them in `theirs`."""
    common = ours * theirs // gcd(ours, theirs)
    return common if num_heads % common == 0 else ours


def head_shards(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> int:
    """In how many parts `sharding` holds the heads of an array of `shape`; replicas count once."""
    return shape[HEADS] // sharding.shard_shape(shape)[HEADS]


def possible_parts(shards: int, num_heads: int) -> tuple[int, ...]:
    """Every number of parts a mesh with `shards` may be asked for."""
    limit = max(MAX_PARTS, shards)
    return tuple(n for n in range(shards, limit + 1, shards) if num_heads % n == 0)


class HeadMesh:
    """The devices that hold the heads of a piece, in the order of heads, one replica of each."""

    def __init__(self, sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> None:
        owners: dict[int, Any] = {}
        for device, index in sharding.devices_indices_map(shape).items():
            owners.setdefault(index[HEADS].start or 0, device)
        self.devices = tuple(owners[begin] for begin in sorted(owners))
        mesh = Mesh(np.array(self.devices), (_AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
        self.sharding = NamedSharding(mesh, PartitionSpec(None, None, _AXIS))
        self.sums = NamedSharding(mesh, PartitionSpec(_AXIS))

    @property
    def num_shards(self) -> int:
        """Devices."""
        return len(self.devices)

    def local(self, array: jax.Array) -> list[jax.Array]:
        """The single-device arrays of `array` on these devices."""
        by_device = {shard.device: shard.data for shard in array.addressable_shards}
        if not by_device.keys() >= set(self.devices):
            raise ValueError(f"a piece lies on {sorted(map(str, by_device))}, wanted {sorted(map(str, self.devices))}")
        return [by_device[device] for device in self.devices]

    def whole(self, locals_: Sequence[jax.Array]) -> jax.Array:
        """One array of one single-device array per device."""
        layers, tokens, heads, features = locals_[0].shape
        shape = (layers, tokens, heads * self.num_shards, features)
        return jax.make_array_from_single_device_arrays(shape, self.sharding, list(locals_))


class Cutter:
    """P's half, for pieces like `example`."""

    def __init__(self, example: Sequence[jax.Array], *, checksums: bool) -> None:
        self.mesh = HeadMesh(example[0].sharding, example[0].shape)
        self._example = example
        self._num_heads = example[0].shape[HEADS]
        self._buckets = token_buckets(example[0].shape[1])
        self._cut = _on_shards(partial(_cut_shard, checksums=checksums), self.mesh, ("num_parts", "num_tokens"))

    def warm_up(self) -> int:
        """Compile and run everything; returns how many functions."""
        wanted = [(n, t) for n in possible_parts(self.mesh.num_shards, self._num_heads) for t in self._buckets]
        for num_parts, num_tokens in wanted:
            self.cut(self._example, num_parts, num_tokens)
        return len(wanted)

    def num_parts(self, receiver_shards: int) -> int:
        """Parts for a receiver whose mesh holds heads in `receiver_shards`; only numbers that `warm_up` has seen."""
        num_parts = num_parts_for(self.mesh.num_shards, receiver_shards, self._num_heads)
        return num_parts if num_parts in possible_parts(self.mesh.num_shards, self._num_heads) else self.mesh.num_shards

    def cut(self, arrays: Sequence[jax.Array], num_parts: int, num_tokens: int) -> tuple[list[jax.Array], int]:
        """Parts in order of (array, head), at least `num_tokens` long, and their checksum. Waits for the device."""
        bucket = next(bucket for bucket in self._buckets if bucket >= num_tokens)
        local = [self.mesh.whole(self.mesh.local(array)) for array in arrays]
        per_shard = num_parts // self.mesh.num_shards
        slices, sums = self._cut(np.int32(num_tokens), *local, num_parts=per_shard, num_tokens=bucket)
        parts = [part for of_array in slices for part in self._in_order(of_array)]
        jax.block_until_ready(parts)
        return parts, combine(np.asarray(sums))

    def _in_order(self, slices: Sequence[jax.Array]) -> list[jax.Array]:
        by_slice = [self.mesh.local(one) for one in slices]
        return [of_slice[shard] for shard in range(self.mesh.num_shards) for of_slice in by_slice]


class Joiner:
    """D's half, for pieces that become arrays like `shapes` and `dtypes` with `sharding`."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any], sharding: jax.sharding.Sharding, *, checksums: bool
    ) -> None:
        self.mesh = HeadMesh(sharding, shapes[0])
        self._shapes = shapes
        self._dtypes = dtypes
        self._buckets = token_buckets(shapes[0][1])
        join = partial(_join_shard, num_arrays=len(shapes), checksums=checksums)
        self._join = _on_shards(join, self.mesh, ("chunk_tokens",))
        self._known: set[tuple[int, int]] = set()  # (parts, tokens) that are compiled

    def warm_up(self) -> int:
        """Compile and run everything; returns how many functions."""
        num_heads = self._shapes[0][HEADS]
        wanted = [(n, t) for n in possible_parts(self.mesh.num_shards, num_heads) for t in self._buckets]
        for num_parts, num_tokens in wanted:
            self._known.add((num_parts, num_tokens))
            self.join([jnp.zeros(s.shape, s.dtype, device=s.sharding) for s in self.specs(num_parts, num_tokens)], num_parts)
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
            jax.ShapeDtypeStruct(
                (layers, num_tokens, heads // num_parts, features), dtype, sharding=jax.sharding.SingleDeviceSharding(device)
            )
            for (layers, _, heads, features), dtype in zip(self._shapes, self._dtypes, strict=True)
            for device in self.devices(num_parts)
        ]

    def join(self, parts: Sequence[jax.Array], num_parts: int) -> tuple[list[jax.Array], int]:
        """The arrays, padded with zeros, on the devices of `mesh`, and the checksum of the parts. Waits."""
        per_shard = num_parts // self.mesh.num_shards
        slices = [
            self.mesh.whole([parts[of_array * num_parts + shard * per_shard + i] for shard in range(self.mesh.num_shards)])
            for of_array in range(len(self._shapes))
            for i in range(per_shard)
        ]
        arrays, sums = self._join(*slices, chunk_tokens=self._shapes[0][1])
        return jax.block_until_ready(list(arrays)), combine(np.asarray(sums))


def combine(sums: np.ndarray) -> int:
    """Sums u32[shards, arrays, slices, 2] -> one number from 1 to 2^64 - 1; 0 where there are none."""
    if not sums.size:
        return 0
    ordered = sums.transpose(1, 0, 2, 3).reshape(-1, 2)  # by array, then head: the same however either mesh is cut
    low = high = 0
    for index, (first, second) in enumerate(ordered.tolist()):
        low = (low * 0x01000193 + first + index) & 0xFFFFFFFF
        high = (high * 0x01000193 + second + index) & 0xFFFFFFFF
    return (high << 32 | low) or 1


def sums_on_host(parts: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """u32[1, arrays, parts, 2] of each array's parts, as `combine` takes them: for pieces nothing was compiled for."""
    with np.errstate(over="ignore"):
        return np.stack([np.stack([_part_sums(part, np) for part in of_array]) for of_array in parts])[None]


def _on_shards(function: Any, mesh: HeadMesh, static: tuple[str, ...]) -> Any:
    """`function` on every shard by itself; it takes arrays (and numbers) and returns (arrays split along heads, sums)."""

    def run(*arrays: jax.Array, **fixed: int) -> Any:
        specs = tuple(mesh.sharding.spec if array.ndim else PartitionSpec() for array in arrays)
        out = (mesh.sharding.spec, mesh.sums.spec)
        mapped = jax.shard_map(
            partial(function, **fixed), mesh=mesh.sharding.mesh, in_specs=specs, out_specs=out, check_vma=False
        )
        return mapped(*arrays)

    return jax.jit(run, static_argnames=static)


def _cut_shard(length: jax.Array, *arrays: jax.Array, num_parts: int, num_tokens: int, checksums: bool) -> Any:
    is_token = (jnp.arange(num_tokens, dtype=jnp.int32) < length)[None, :, None, None]  # padding is nobody's business
    trimmed = [jnp.where(is_token, array[:, :num_tokens], jnp.zeros((), array.dtype)) for array in arrays]
    slices = [tuple(jnp.split(array, num_parts, axis=HEADS)) for array in trimmed]
    return tuple(slices), _all_sums(slices, checksums)


def _join_shard(*parts: jax.Array, num_arrays: int, chunk_tokens: int, checksums: bool) -> Any:
    per_array = len(parts) // num_arrays
    slices = [parts[i * per_array : (i + 1) * per_array] for i in range(num_arrays)]
    arrays = []
    for of_array in slices:
        whole = jnp.concatenate(of_array, axis=HEADS)
        padding = [(0, 0), (0, chunk_tokens - whole.shape[1]), (0, 0), (0, 0)]
        arrays.append(jnp.pad(whole, padding))
    return tuple(arrays), _all_sums(slices, checksums)


def _all_sums(slices: Sequence[Sequence[jax.Array]], checksums: bool) -> jax.Array:
    """u32[1, arrays, slices, 2]."""
    if not checksums:
        return jnp.zeros((1, 0, 0, 2), jnp.uint32)
    return jnp.stack([jnp.stack([_part_sums(part, jnp) for part in of_array]) for of_array in slices])[None]


def _part_sums(part: Any, np_: Any) -> Any:
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
