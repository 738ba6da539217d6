"""What this machine can do at best, measured: bytes read from memory per second, and floating-point operations per second."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

MEMORY_BYTES = 2**29  # past every cache
SIDE, ROUNDS = 2048, 3


def memory_rate() -> float:
    """Bytes per second of a sum over memory."""
    data = jnp.ones(MEMORY_BYTES // 4, jnp.float32)
    return MEMORY_BYTES / _best_s(jax.jit(jnp.sum), data)


def product_rate(dtype: str) -> float:
    """Operations per second of a large square product with float32 sums."""
    a = jnp.asarray(np.random.default_rng(0).standard_normal((SIDE, SIDE)), dtype)
    return 2 * SIDE**3 / _best_s(jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32)), a)


def _best_s(function: jax.stages.Wrapped, argument: jax.Array) -> float:
    jax.block_until_ready(function(argument))
    taken = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        jax.block_until_ready(function(argument))
        taken.append(time.perf_counter() - began_s)
    return min(taken)
