"""The devices that hold a piece's heads, and functions that run on each of them by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

HEADS = 2  # axis of a piece
_AXIS = "shard"


def head_shards(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> int:
    """In how many parts `sharding` holds the heads of an array of `shape`; replicas count once."""
    return shape[HEADS] // sharding.shard_shape(shape)[HEADS]


class HeadMesh:
    """The devices that hold the heads of a piece, in the order of heads, one replica of each."""

    def __init__(self, sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> None:
        owners: dict[int, Any] = {}
        for device, index in sharding.devices_indices_map(shape).items():
            owners.setdefault(index[HEADS].start or 0, device)
        self.devices = tuple(owners[begin] for begin in sorted(owners))
        mesh = Mesh(np.array(self.devices), (_AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
        self.sharding = NamedSharding(mesh, PartitionSpec(None, None, _AXIS))
        self._by_shard = NamedSharding(mesh, PartitionSpec(_AXIS))

    @property
    def num_shards(self) -> int:
        """Devices."""
        return len(self.devices)

    def local(self, array: jax.Array) -> list[jax.Array]:
        """The single-device arrays of `array` on these devices, not copied."""
        by_device = {shard.device: shard.data for shard in array.addressable_shards}
        if not by_device.keys() >= set(self.devices):
            raise ValueError(f"a piece lies on {sorted(map(str, by_device))}, wanted {sorted(map(str, self.devices))}")
        return [by_device[device] for device in self.devices]

    def whole(self, locals_: Sequence[jax.Array]) -> jax.Array:
        """One array of one single-device array per device, not copied."""
        layers, tokens, heads, features = locals_[0].shape
        shape = (layers, tokens, heads * self.num_shards, features)
        return jax.make_array_from_single_device_arrays(shape, self.sharding, list(locals_))

    def parts(self, slices: Sequence[jax.Array]) -> list[jax.Array]:
        """What `whole` was made of, slice by slice, in the order of heads: every shard holds one of each slice."""
        by_slice = [self.local(one) for one in slices]
        return [of_slice[shard] for shard in range(self.num_shards) for of_slice in by_slice]

    def slices(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """`parts` backwards, of one array."""
        per_shard = len(parts) // self.num_shards
        return [self.whole(parts[i::per_shard]) for i in range(per_shard)]

    def jit(self, function: Callable[..., Any], *static: str, per_shard: bool = False) -> Any:
        """`function` of arrays split along heads (and numbers), compiled for every shard by itself. Returns arrays split along
        heads, or with `per_shard` one row a shard."""
        out = (self._by_shard if per_shard else self.sharding).spec

        def run(*arrays: jax.Array, **fixed: int) -> Any:
            specs = tuple(self.sharding.spec if array.ndim else PartitionSpec() for array in arrays)
            mapped = jax.shard_map(
                partial(function, **fixed), mesh=self.sharding.mesh, in_specs=specs, out_specs=out, check_vma=False
            )
            return mapped(*arrays)

        return jax.jit(run, static_argnames=static)
