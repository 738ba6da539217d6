"""Pages out of the cache for TPU, with a change of dtype on the way.

    step i    | copy the pages of step i + 1 -> other buffer | wait for i | convert -> out, stored while the next is made |

A step takes several pages: it costs more than the copy of a small one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.loops import arrive, loop

_STEP_BYTES = 2**18
_MOST_PAGES = 16


def pages_per_step(kv: jax.Array, num_pages: int) -> int:
    """Pages of kv [L, P, K, S, F] that one step of a gather or scatter moves."""
    page_bytes = kv.shape[2] * kv.shape[3] * kv.shape[4] * kv.dtype.itemsize
    return max(1, min(_STEP_BYTES // page_bytes, _MOST_PAGES, num_pages))


def gather_pages(kv: jax.Array, pages: jax.Array, *, dtype: Any, interpret: Any) -> jax.Array:
    """dtype[L, N, K, S, F] of pages i32[N], which exist, of kv [L, P, K, S, F]."""
    (num_layers, _, *page), num_pages = kv.shape, pages.shape[0]
    per_step = pages_per_step(kv, num_pages)
    padded = jnp.pad(pages, (0, -num_pages % per_step))
    num_steps = padded.shape[0] // per_step
    out = pl.pallas_call(
        partial(_kernel, per_step=per_step),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_layers, num_steps),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((1, per_step, *page), lambda layer, step, *_: (layer, step, 0, 0, 0)),
            scratch_shapes=[pltpu.VMEM((2, per_step, *page), kv.dtype), pltpu.SemaphoreType.DMA((2,))],
        ),
        out_shape=jax.ShapeDtypeStruct((num_layers, padded.shape[0], *page), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="kv_gather",
    )(padded, kv)
    return out[:, :num_pages]


def _kernel(pages: Any, cache: Any, out: Any, buffers: Any, semaphores: Any, *, per_step: int) -> None:
    """One step: refs in SMEM (pages), HBM (cache) and VMEM (out, buffers)."""
    num_steps = pl.num_programs(1)
    step = pl.program_id(0) * num_steps + pl.program_id(1)

    def each_copy(number: jax.Array, act: Callable[[Any], None]) -> None:
        layer, first, buffer = number // num_steps, lax.rem(number, num_steps) * per_step, lax.rem(number, 2)
        loop(
            per_step,
            lambda page: act(
                pltpu.make_async_copy(cache.at[layer, pages[first + page]], buffers.at[buffer, page], semaphores.at[buffer])
            ),
        )

    @pl.when(step == 0)
    def _() -> None:
        each_copy(step, lambda copy: copy.start())

    @pl.when(step + 1 < pl.num_programs(0) * num_steps)
    def _() -> None:
        each_copy(step + 1, lambda copy: copy.start())

    def use() -> None:
        out[0] = buffers[lax.rem(step, 2)].astype(out.dtype)

    arrive(lambda: each_copy(step, lambda copy: copy.wait()), use)
