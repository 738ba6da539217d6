"""Random numbers of sampling: a pure function of (seed, choice, position), the same on every device and jax we support.

Position is the index, in the whole sequence, of the token being sampled, so that a replay draws what the first run drew.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def gumbel(seeds: jax.Array, choices: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Standard Gumbel noise f32[R, V] for u32 seeds[R], i32 choices[R], i32 positions[R]."""
    bits = jax.vmap(lambda seed, choice, position: _bits(seed, choice, position, vocab_size))(seeds, choices, positions)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)  # in (0, 1), both ends excluded
    return -jnp.log(-jnp.log(uniform))


def _bits(seed: jax.Array, choice: jax.Array, position: jax.Array, num: int) -> jax.Array:
    key = jax.random.key(seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, choice), position)
    return jax.random.bits(key, (num,), jnp.uint32)
