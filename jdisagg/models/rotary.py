"""Rotary position embedding on the device: rotation in float32 from the position of each token.

RoFormer (arXiv:2104.09864), in the half-split form: feature d turns together with feature d + D/2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jdisagg.models.rope import RopeSpec


def angles(rope: RopeSpec, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, f32[T, 1, D/2], of the rotation at positions i32[T]."""
    turned = positions.astype(jnp.float32)[:, None] * jnp.asarray(rope.inverse_frequencies())[None, :]
    return jnp.cos(turned)[:, None, :], jnp.sin(turned)[:, None, :]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the feature pairs of x [T, H, D] in float32; the result has x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
