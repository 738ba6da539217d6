"""Scales of int8 KV into the cache for TPU: a page's are read, merged with the new ones and written back.

    scales of a page: [K, 2, S], tokens along the lanes; XLA's scatter wants them otherwise, and copies all there are

Tokens are sorted by page, so every page is touched once (see `tpu_write`). Scales are not negative: -1 marks what is not new.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu_write import runs_of

_OLD = -1.0


def store_scales(
    scales: jax.Array,
    layer: int | jax.Array,
    rows: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    most_pages: int,
    interpret: Any = False,
) -> jax.Array:
    """`scales` [L, P, K, S, 2] with rows [T, K, 2] at (pages i32[T], offsets i32[T]) of one layer; in place when donated.

    Positions are distinct, except on pages whose content does not matter. `most_pages` bounds how many pages they touch: those
    beyond it are not written. Pages from P on are left out.
    """
    page_size = scales.shape[3]
    target, source, num_runs = runs_of(pages, offsets, scales.shape[1], page_size, most_pages)
    new = jnp.where(source[..., None, None] >= 0, rows[jnp.maximum(source, 0)], _OLD)  # [R, S, K, 2]
    block = (1, 1, scales.shape[2], 2, page_size)

    def of_cache(item: jax.Array, target: Any, layer: Any) -> tuple[Any, ...]:
        return layer[0], target[item], 0, 0, 0

    out = pl.pallas_call(
        _merge,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(jnp.maximum(num_runs, 1),),  # of none, page 0 keeps what it holds
            in_specs=[pl.BlockSpec((1, *block[2:]), lambda item, *_: (item, 0, 0, 0)), pl.BlockSpec(block, of_cache)],
            out_specs=pl.BlockSpec(block, of_cache),
        ),
        out_shape=jax.ShapeDtypeStruct((*scales.shape[:3], 2, page_size), scales.dtype),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="kv_write_scales",
    )(target, jnp.asarray(layer, jnp.int32).reshape(1), new.transpose(0, 2, 3, 1), scales.swapaxes(3, 4))
    return out.swapaxes(3, 4)


def _merge(target: Any, layer: Any, new: Any, old: Any, out: Any) -> None:
    """One page: refs in SMEM (target, layer) and VMEM (new, old, out)."""
    del target, layer
    out[0, 0] = jnp.where(new[0] == _OLD, old[0, 0], new[0])
