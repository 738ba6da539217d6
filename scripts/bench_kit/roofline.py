"""What this device does at best, measured in the same run as what is compared with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

AT_ONCE = 4  # dispatched before waiting: the host's part of a call is hidden
WARM_UPS = 2


def seconds_each(run: Callable[[], Any], *, repeats: int, at_once: int = AT_ONCE) -> list[float]:
    """Seconds of one call of `run`, which returns arrays: `repeats` times, each the mean of `at_once` calls."""
    for _ in range(WARM_UPS):
        jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        last: Any = None
        for _ in range(at_once):
            last = run()
        jax.block_until_ready(last)
        times.append((time.perf_counter() - began_s) / at_once)
    return times


def copy_bytes_per_s(num_bytes: int, *, repeats: int) -> list[float]:
    """Bytes read and written by a pass over an array of `num_bytes`, per second."""
    x = jax.random.bits(jax.random.key(0), (num_bytes // 4,), jnp.uint32)
    touch = jax.jit(lambda array: array + jnp.uint32(1))
    return [2 * num_bytes / seconds for seconds in seconds_each(lambda: touch(x), repeats=repeats)]


def read_bytes_per_s(num_bytes: int, *, repeats: int) -> list[float]:
    """Of a sum over an array of `num_bytes`, one at a time."""
    x, add = jnp.ones(num_bytes // 4, jnp.float32), jax.jit(jnp.sum)
    return [num_bytes / seconds for seconds in seconds_each(lambda: add(x), repeats=repeats, at_once=1)]


def matmul_flop_per_s(size: int, *, repeats: int, dtype: str = "bfloat16", at_once: int = AT_ONCE) -> list[float]:
    """Of a square product of random matrices, accumulated in float32."""
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (1, 2))
    product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32).astype(dtype))
    return [2 * size**3 / seconds for seconds in seconds_each(lambda: product(a, b), repeats=repeats, at_once=at_once)]
