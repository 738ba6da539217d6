"""Paged decode attention for TPU: one query per sequence, pages copied from HBM two blocks at a time.

    block i     | copy i + 1 -> other buffer | wait i | scores, online softmax, sums |
                                                        (masked rows contribute nothing, whatever they hold)

The cache is seen as [L, P, S * K, F]: a page is a matrix of (token, head) rows. All query heads meet all rows in one
product and rows of other heads are masked: K times the arithmetic, which a bandwidth-bound step has to spare, and no
strided loads of single heads. Copies are waited for before their buffer is read, and a buffer is refilled only after that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_LOWEST = -1e30


def decode_attend(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    page_tables: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    window: int | None,
    heads_major: bool,
    block_tokens: int = 128,
    interpret: Any = False,
) -> jax.Array:
    """Attention of q [B, H, D] at positions i32[B] over the pages of page_tables i32[B, M]; returns [B, H, D].

    `kv` is [L, P, K, S, F] (heads-major) or [L, P, S, K, F], F = 2 * D; `layer` is i32[]. What pages hold past a sequence's
    position, or before its window, is ignored, NaN included. `interpret` is passed to Pallas.
    """
    num_layers, num_pages, first, second, features = kv.shape
    num_kv_heads, page_size = (first, second) if heads_major else (second, first)
    num_rows, num_heads, dim = q.shape
    block_pages = max(1, min(block_tokens // page_size, page_tables.shape[1]))
    tables = jnp.pad(page_tables, ((0, 0), (0, -page_tables.shape[1] % block_pages)))
    kernel = partial(
        _kernel,
        scale=scale,
        window=window,
        group=num_heads // num_kv_heads,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        heads_major=heads_major,
    )
    row = pl.BlockSpec((1, num_heads, dim), lambda index, *_: (index, 0, 0))
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_rows,),
            in_specs=[row, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=row,
            scratch_shapes=[
                pltpu.VMEM((2, block_pages, page_size * num_kv_heads, features), kv.dtype),
                pltpu.SemaphoreType.DMA((2, block_pages)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        interpret=interpret,
        name="paged_decode_attention",
    )(
        layer.reshape(1),
        positions,
        tables,
        q.astype(kv.dtype),
        kv.reshape(num_layers, num_pages, page_size * num_kv_heads, features),
    )


def _kernel(  # noqa: PLR0917
    layer: Any,
    positions: Any,
    tables: Any,
    q: Any,
    cache: Any,
    out: Any,
    buffers: Any,
    semaphores: Any,
    *,
    scale: float,
    window: int | None,
    group: int,
    page_size: int,
    num_kv_heads: int,
    heads_major: bool,
) -> None:
    """One sequence: refs in SMEM (layer, positions, tables), VMEM (q, out, buffers) and HBM (cache)."""
    index = pl.program_id(0)
    position = positions[index]
    num_heads, dim = q.shape[1:]
    block_pages, rows_per_page, features = buffers.shape[1:]
    block = block_pages * page_size
    num_blocks = position // block + 1
    first_block = 0 if window is None else jnp.maximum(position - window + 1, 0) // block

    def copies(number: jax.Array, buffer: jax.Array) -> list[Any]:
        return [
            pltpu.make_async_copy(
                cache.at[layer[0], tables[index, number * block_pages + page]],
                buffers.at[buffer, page],
                semaphores.at[buffer, page],
            )
            for page in range(block_pages)
        ]

    for copy in copies(jnp.int32(first_block), lax.rem(jnp.int32(first_block), 2)):
        copy.start()

    num_rows = block_pages * rows_per_page
    place = partial(_place, page_size=page_size, num_kv_heads=num_kv_heads, heads_major=heads_major)
    row_token, row_head = place(lax.broadcasted_iota(jnp.int32, (num_heads, num_rows), 1))
    value_token, _ = place(lax.broadcasted_iota(jnp.int32, (num_rows, dim), 0))  # the same, rows on the other axis
    same_head = row_head == lax.broadcasted_iota(jnp.int32, (num_heads, num_rows), 0) // group
    queries = q[0]
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None

    def step(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, sums = carry
        buffer = lax.rem(number, 2)

        @pl.when(number + 1 < num_blocks)
        def _() -> None:
            for copy in copies(number + 1, 1 - buffer):
                copy.start()

        for copy in copies(number, buffer):
            copy.wait()
        rows = buffers[buffer].reshape(num_rows, features)
        here = position - number * block
        mask = same_head & _seen(here - row_token, window)
        scores = _dot(queries, rows[:, :dim], transposed=True, precision=precision) * scale
        scores = jnp.where(mask, scores, _LOWEST)
        new_largest = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
        weights = jnp.where(mask, jnp.exp(scores - new_largest), 0.0)
        shrink = jnp.exp(largest - new_largest)
        values = jnp.where(_seen(here - value_token, window), rows[:, dim:], jnp.zeros((), rows.dtype))
        new = _dot(weights.astype(rows.dtype), values, transposed=False, precision=precision)
        return new_largest, total * shrink + weights.sum(axis=-1, keepdims=True), sums * shrink + new

    start = (
        jnp.full((num_heads, 1), _LOWEST, jnp.float32),
        jnp.zeros((num_heads, 1), jnp.float32),
        jnp.zeros((num_heads, dim), jnp.float32),
    )
    _, total, sums = lax.fori_loop(first_block, num_blocks, step, start)
    out[0] = (sums / total).astype(out.dtype)


def _place(row: jax.Array, *, page_size: int, num_kv_heads: int, heads_major: bool) -> tuple[jax.Array, jax.Array]:
    """(token within the block, kv head) of rows of a block."""
    page, inside = row // (page_size * num_kv_heads), lax.rem(row, page_size * num_kv_heads)
    token = lax.rem(inside, page_size) if heads_major else inside // num_kv_heads
    head = inside // page_size if heads_major else lax.rem(inside, num_kv_heads)
    return page * page_size + token, head


def _seen(distance: jax.Array, window: int | None) -> jax.Array:
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _dot(a: jax.Array, b: jax.Array, *, transposed: bool, precision: lax.Precision | None) -> jax.Array:
    contract = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)
