"""Pages into the cache for TPU, with a change of dtype on the way.

    step i    | wait until step i - 2 has left its buffer | convert -> buffer | start its copies |    last: wait for all

Of the pages' tokens only a range is new. A page on its edge is read first, and keeps the rest.
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
from pallas_kernels.tpu_gather import pages_per_step


def scatter_pages(kv: jax.Array, new: jax.Array, pages: jax.Array, span: jax.Array, *, interpret: Any) -> jax.Array:
    """kv [L, P, K, S, F] with tokens [span[0], span[1]) of new [L, N, K, S, F] in pages i32[N], which exist; donated, in place.

    Pages are distinct, except for those whose tokens are all outside `span` i32[2]. Token i is slot i % S of page i // S.
    """
    (num_layers, _, *page), num_pages = kv.shape, pages.shape[0]
    per_step = pages_per_step(kv, num_pages)
    missing = -num_pages % per_step
    num_steps = (num_pages + missing) // per_step
    return pl.pallas_call(
        partial(_kernel, per_step=per_step),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_layers, num_steps),
            in_specs=[
                pl.BlockSpec((1, per_step, *page), lambda layer, step, *_: (layer, step, 0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((2, per_step, *page), kv.dtype),
                pltpu.VMEM(tuple(page), kv.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="kv_scatter",
    )(jnp.pad(pages, (0, missing)), span, jnp.pad(new, ((0, 0), (0, missing), (0, 0), (0, 0), (0, 0))), kv)


def _kernel(  # noqa: PLR0917
    pages: Any,
    span: Any,
    new: Any,
    old: Any,
    cache: Any,
    buffers: Any,
    edge: Any,
    semaphores: Any,
    edge_semaphore: Any,
    *,
    per_step: int,
) -> None:
    """One step: refs in SMEM (pages, span), VMEM (new, buffers, edge) and HBM (cache, which is `old` too)."""
    del old
    num_steps = pl.num_programs(1)
    step, last = pl.program_id(0) * num_steps + pl.program_id(1), pl.num_programs(0) * num_steps - 1
    page_size = edge.shape[1]

    def part(number: Any, page: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Index of a page of a step, and its slots [low, high) that are new."""
        index = lax.rem(number, num_steps) * per_step + page
        first = index * page_size
        return index, jnp.clip(span[0] - first, 0, page_size), jnp.clip(span[1] - first, 0, page_size)

    def each_copy(number: Any, act: Callable[[Any], None]) -> None:
        def of_page(page: jax.Array) -> None:
            index, low, high = part(number, page)
            buffer = lax.rem(number, 2)

            @pl.when(low < high)
            def _() -> None:
                target = cache.at[number // num_steps, pages[index]]
                act(pltpu.make_async_copy(buffers.at[buffer, page], target, semaphores.at[buffer]))

        loop(per_step, of_page)

    def leave(number: int | jax.Array) -> None:
        each_copy(number, lambda copy: copy.wait())

    def fill() -> None:
        buffer = lax.rem(step, 2)
        buffers[buffer] = new[0].astype(buffers.dtype)

        def mend(page: jax.Array) -> None:
            index, low, high = part(step, page)

            @pl.when((low < high) & (high - low < page_size))
            def _() -> None:
                copy = pltpu.make_async_copy(cache.at[step // num_steps, pages[index]], edge, edge_semaphore)
                copy.start()
                copy.wait()
                slot = lax.broadcasted_iota(jnp.int32, edge.shape, 1)
                wide = jnp.int32 if jnp.issubdtype(edge.dtype, jnp.integer) else jnp.float32
                both = jnp.where((slot >= low) & (slot < high), buffers[buffer, page].astype(wide), edge[...].astype(wide))
                buffers[buffer, page] = both.astype(edge.dtype)

        loop(per_step, mend)

    def wait() -> None:
        @pl.when(step >= 2)
        def _() -> None:
            leave(step - 2)

    arrive(wait, fill)
    each_copy(step, lambda copy: copy.start())

    @pl.when(step == last)
    def _() -> None:
        @pl.when(last > 0)
        def _() -> None:
            leave(last - 1)

        leave(last)
