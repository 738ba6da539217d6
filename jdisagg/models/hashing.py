"""Integer hashing on the device: the same bits on every platform, under any sharding; compiles in a fraction of threefry."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def element_index(shape: tuple[int, ...]) -> jax.Array:
    """u32[shape]: number of each element in row-major order, wrapping."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, axis)
    return index


def mix(x: jax.Array) -> jax.Array:
    """A bijection of u32 that spreads every input bit: multiply, shift, exclusive or."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))
