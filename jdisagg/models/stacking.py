"""Layers stacked on a leading axis, for `lax.scan`: compiles faster; slower than unrolled layers on CPU and GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jdisagg.models.declare import Declared, Make, Path, build
from jdisagg.models.spec import ModelSpec


def build_stacked(spec: ModelSpec, make: Make) -> dict[str, Any]:
    """As `declare.build`, with "layers" one dict of [L, ...] arrays. Each is allocated once, and written layer by layer: beside
    the parameters there is never more than one of a single layer. A stack of what is there already would need room for itself
    beside all weights, and in one piece."""
    stacks: dict[Path, _Stack] = {}

    def put(path: Path, declared: Declared) -> jax.Array | None:
        made = make(path, declared)
        if path[0] != "layers":
            return made
        if path[2:] not in stacks:
            stacks[path[2:]] = _Stack(spec.num_layers, made)
        stacks[path[2:]].write(int(path[1]), made)
        return None

    params, layers = build(spec, put), dict[str | int, Any]()
    for path, stack in stacks.items():
        node = layers
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = stack.whole
    return {**params, "layers": layers}


class _Stack:
    """One parameter of all layers."""

    def __init__(self, num_layers: int, like: jax.Array) -> None:
        sharding, shape = over_layers(like.sharding), (num_layers, *like.shape)
        self._index = NamedSharding(sharding.mesh, PartitionSpec())
        self._write = jax.jit(_written, donate_argnums=0, out_shardings=sharding)
        self.whole = jax.jit(partial(jnp.zeros, shape, like.dtype), out_shardings=sharding)()

    def write(self, layer: int, made: jax.Array) -> None:
        """Take over one layer's, which is deleted."""
        self.whole = self._write(self.whole, made, jax.device_put(np.int32(layer), self._index)).block_until_ready()
        made.delete()


def _written(whole: jax.Array, part: jax.Array, layer: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(whole, part, layer, 0)


def over_layers(sharding: Any) -> NamedSharding:
    """Of a stack of arrays that lie as `sharding` says."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
