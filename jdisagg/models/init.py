"""Random parameters straight on their devices: `--load-format dummy`, benches and training from scratch."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdisagg.models.declare import Declared, Path, build
from jdisagg.models.sharding import param_sharding
from jdisagg.models.spec import ModelSpec


def random_params(spec: ModelSpec, mesh: Mesh, dtype: str, *, seed: int) -> dict[str, Any]:
    """Parameters drawn from the declared scales. The same seed gives the same values on every mesh."""
    root = jax.device_put(jax.random.key(seed), NamedSharding(mesh, PartitionSpec()))
    draws: dict[Hashable, Any] = {}  # layers share shapes: one compilation for each distinct one

    def make(_: Path, declared: Declared) -> jax.Array:
        sharding = param_sharding(mesh, spec, declared)
        kind = (declared.shape, declared.scale, sharding)
        if kind not in draws:
            one = functools.partial(_draw, shape=declared.shape, scale=declared.scale, dtype=dtype)
            draws[kind] = jax.jit(one, out_shardings=sharding)
        return draws[kind](root, np.uint32(zlib.crc32(declared.name.encode())))

    return build(spec, make)


def _draw(root: jax.Array, number: jax.Array, *, shape: tuple[int, ...], scale: float | None, dtype: str) -> jax.Array:
    if scale is None:
        return jnp.ones(shape, dtype)
    return (scale * jax.random.normal(jax.random.fold_in(root, number), shape, jnp.float32)).astype(dtype)
