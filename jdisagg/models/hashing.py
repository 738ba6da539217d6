"""Integer hashing on the device: the same bits on every platform, under any sharding; compiles in a fraction of threefry."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def element_index(shape: tuple[int, ...], starts: tuple[int | jax.Array, ...], whole: tuple[int, ...]) -> jax.Array:
    """u32[shape]: row-major number, wrapping, of each element of the block at `starts` of an array of shape `whole`."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis, (start, size) in enumerate(zip(starts, whole, strict=True)):
        at = lax.broadcasted_iota(jnp.uint32, shape, axis) + jnp.asarray(start, jnp.uint32)
        index = index * jnp.uint32(size) + at
    return index


def mix(x: jax.Array) -> jax.Array:
    """A bijection of u32 that spreads every input bit: multiply, shift, exclusive or."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))
