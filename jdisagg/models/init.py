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

from jdisagg.models.declare import Build, Declared, Path, build
from jdisagg.models.hashing import element_index, mix
from jdisagg.models.sharding import param_sharding
from jdisagg.models.spec import ModelSpec


def random_params(spec: ModelSpec, mesh: Mesh, dtype: str, assemble: Build = build, *, seed: int) -> dict[str, Any]:
    """What `assemble` makes, with the declared standard deviations. The same seed gives the same values on every mesh."""
    draws: dict[Hashable, Any] = {}  # layers share shapes: one compilation for each distinct one

    def make(_: Path, declared: Declared) -> jax.Array:
        sharding = param_sharding(mesh, spec, declared)
        kind = (declared.shape, declared.scale, sharding)
        if kind not in draws:
            one = functools.partial(_draw, shape=declared.shape, scale=declared.scale, dtype=dtype)
            draws[kind] = jax.jit(one, out_shardings=sharding)
        number = np.uint32(zlib.crc32(f"{seed} {declared.name}".encode()))
        return draws[kind](jax.device_put(number, NamedSharding(mesh, PartitionSpec())))

    return assemble(spec, make)


def _draw(number: jax.Array, *, shape: tuple[int, ...], scale: float | None, dtype: str) -> jax.Array:
    """Uniform with standard deviation `scale`; `number` u32 selects the stream."""
    if scale is None:
        return jnp.ones(shape, dtype)
    bits = mix(element_index(shape, (0,) * len(shape), shape) ^ mix(number)) >> jnp.uint32(8)
    return ((bits.astype(jnp.float32) * 2.0**-24 - 0.5) * (12**0.5 * scale)).astype(dtype)
