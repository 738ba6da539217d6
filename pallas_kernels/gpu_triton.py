"""Ragged paged attention for Hopper GPUs: one Pallas kernel for Triton, and the only module that knows Triton.

    grid (kv head, split, item): a program takes the queries of one item that share a kv head, and one part of their keys

    | page numbers of a block of keys -> keys, values gathered row by row -> scores, online softmax, sums |  x blocks of keys

With one split a program knows the whole sums and writes what comes out. With more (a few rows that decode cannot keep 132
processors busy) each writes its sums, largest score and total, and `gpu_attention` joins them (flash-decoding: Dao, Haziza,
Massa and Sizov, 2023). The compiler cuts the loop into stages, so that the copies of the next blocks are in flight.

The cache is seen as [L * P * S * K, F] rows, and a row's number fits 32 bits: one wide product per row finds its address.
JAX says that this backend of Pallas will go: another one replaces this file alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.gpu_blocks import GpuBlocks
from pallas_kernels.work import BLOCK, FIRST, HIGH, LOW, LOWEST, OFFSET, ROW, STOP, visible

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuShape:
    """What is fixed when the kernel is compiled."""

    blocks: GpuBlocks
    num_items: int
    tile: int  # queries of an item; tile * group <= blocks.rows
    num_heads: int
    num_kv_heads: int
    dim: int
    num_pages: int
    page_size: int
    window: int | None
    scale: float
    compute_dtype: jnp.dtype
    out_dtype: jnp.dtype

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def lanes(self) -> int:
        """Features of a product: D, or the next power of two a tensor core takes."""
        return max(16, 1 << (self.dim - 1).bit_length())


def attend_items(  # noqa: PLR0917
    work: jax.Array,
    page_tables: jax.Array,
    layer: jax.Array,
    q: jax.Array,
    cache: jax.Array,
    scales: jax.Array | None,
    *,
    shape: GpuShape,
    interpret: Any,
) -> tuple[jax.Array, ...]:
    """Attention of q [T * H, D] over rows of cache [L * P * S * K, F], by the packed work list i32[8, W + 1].

    layer is i32[1]; page_tables i32[B, M], every entry a page that exists; scales f32[L * P * S * K, 2], of keys and values.
    Returns (out [T * H, D],) with one split; else (sums f32[splits * T * H, D], largest scores and totals
    f32[splits * T * H], to the base 2). What belongs to no item is undefined.
    """
    if shape.blocks.splits == 1:
        out_shape: list[Any] = [jax.ShapeDtypeStruct(q.shape, shape.out_dtype)]
    else:
        each = shape.blocks.splits * q.shape[0]
        out_shape = [jax.ShapeDtypeStruct((each, shape.dim), jnp.float32), *[jax.ShapeDtypeStruct((each,), jnp.float32)] * 2]
    operands = [work, page_tables, layer, q, cache, *([] if scales is None else [scales])]
    kernel = partial(_kernel, shape=shape, quantised=scales is not None)
    return tuple(
        pl.pallas_call(
            kernel,
            # the first runs fastest: a token's heads lie together
            grid=(shape.num_kv_heads, shape.blocks.splits, shape.num_items),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(operands),
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(out_shape),
            out_shape=out_shape,
            compiler_params=triton.CompilerParams(num_warps=shape.blocks.warps, num_stages=shape.blocks.stages),
            interpret=interpret,
            name="ragged_paged_decode" if shape.tile == 1 else "ragged_paged_prefill",
        )(*operands)
    )


def _kernel(work: Any, tables: Any, layer: Any, q: Any, cache: Any, *rest: Any, shape: GpuShape, quantised: bool) -> None:
    scales, outs = (rest[0], rest[1:]) if quantised else (None, rest)
    item = shape.num_items - 1 - pl.program_id(2)  # the last of a prompt have the most keys: they begin first
    head = pl.program_id(0)
    row, block, offset, low, high, first, stop = (work[field, item] for field in (ROW, BLOCK, OFFSET, LOW, HIGH, FIRST, STOP))
    lane = jnp.arange(shape.blocks.rows, dtype=jnp.int32)
    query, member = lax.div(lane, shape.group), lax.rem(lane, shape.group)
    mine = (query >= low) & (query < high)
    # Lanes of no query are masked; interpreted, only what is written out of bounds is sure to be left alone.
    place = jnp.where(mine, (block * shape.tile + query) * shape.num_heads + head * shape.group + member, q.shape[0])
    feature = jnp.arange(shape.lanes, dtype=jnp.int32)
    real = feature < shape.dim

    def pairs(rows: jax.Array, which: jax.Array, features: jax.Array, keep: jax.Array) -> tuple[Any, jax.Array]:
        """Indices of (row, feature), and which of them are kept."""
        full = (rows.shape[0], features.shape[0])
        index = lax.broadcast_in_dim(rows, full, (0,)), lax.broadcast_in_dim(features, full, (1,))
        mask = lax.broadcast_in_dim(which, full, (0,))
        return index, mask if shape.lanes == shape.dim else mask & lax.broadcast_in_dim(keep, full, (1,))

    index, mask = pairs(place, mine, feature, real)
    queries = triton.load(q.at[index], mask=mask, other=jnp.zeros((), q.dtype))
    position = offset + query
    most = offset + high  # keys [least, most) are seen by some query
    least = jnp.int32(0) if shape.window is None else jnp.maximum(offset + low - (shape.window - 1), 0)
    of_layer = layer[0] * shape.num_pages
    nothing = jnp.zeros((), cache.dtype)  # a zero of another type would be converted after every copy
    # float32 operands would silently be rounded to 19 bits.
    precision = lax.Precision.HIGHEST if shape.compute_dtype == jnp.float32 else None

    def dot(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
        dims = (((1,), (contract,)), ((), ()))
        return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)

    def step(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, sums = carry
        key = number * shape.blocks.keys + jnp.arange(shape.blocks.keys, dtype=jnp.int32)
        inside = _inside(key, least, most)
        page = triton.load(tables.at[row, _entry(key, shape.page_size)], mask=inside, other=0)
        at = ((of_layer + page) * shape.page_size + lax.rem(key, shape.page_size)) * shape.num_kv_heads + head
        (rows, features), mask = pairs(at, inside, feature, real)
        keys = triton.load(cache.at[rows, features], mask=mask, other=nothing).astype(shape.compute_dtype)
        scores = dot(queries, keys, 1) * (shape.scale * _LOG2_E)
        if scales is not None:
            of_keys = triton.load(scales.at[at, jnp.zeros_like(at)], mask=inside, other=0.0)
            scores = scores * of_keys[None, :]
        seen = visible(position[:, None] - key[None, :], shape.window)
        scores = jnp.where(seen, scores, LOWEST)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.where(seen, jnp.exp2(scores - new_largest[:, None]), 0.0)
        shrink = jnp.exp2(largest - new_largest)
        total = total * shrink + jnp.sum(weights, axis=1)
        if scales is not None:
            weights = weights * triton.load(scales.at[at, jnp.ones_like(at)], mask=inside, other=0.0)[None, :]
        values = triton.load(cache.at[rows, shape.dim + features], mask=mask, other=nothing).astype(shape.compute_dtype)
        new = dot(weights.astype(shape.compute_dtype), values, 0)
        return new_largest, total, sums * shrink[:, None] + new

    each = lax.div(stop - first + (shape.blocks.splits - 1), shape.blocks.splits)
    begin = first + pl.program_id(1) * each
    start = (
        jnp.full((shape.blocks.rows,), LOWEST, jnp.float32),
        jnp.zeros((shape.blocks.rows,), jnp.float32),
        jnp.zeros((shape.blocks.rows, shape.lanes), jnp.float32),
    )
    largest, total, sums = lax.fori_loop(begin, _end(begin, each, stop), step, start)
    if shape.blocks.splits == 1:
        sums = (sums / jnp.where(total > 0, total, 1.0)[:, None]).astype(shape.out_dtype)
    else:
        place = jnp.where(mine, pl.program_id(1) * q.shape[0] + place, shape.blocks.splits * q.shape[0])
        triton.store(outs[1].at[place], largest, mask=mine)
        triton.store(outs[2].at[place], total, mask=mine)
    index, mask = pairs(place, mine, feature, real)
    triton.store(outs[0].at[index], sums, mask=mask)


# What is easily wrong: tests replace these, and `visible`, to plant faults.


def _inside(key: jax.Array, least: jax.Array, most: jax.Array) -> jax.Array:
    """Which keys are read."""
    return (key >= least) & (key < most)


def _entry(key: jax.Array, page_size: int) -> jax.Array:
    """Index into a page table."""
    return lax.div(key, page_size)


def _end(begin: jax.Array, each: jax.Array, stop: jax.Array) -> jax.Array:
    """Where a split's blocks of keys stop."""
    return jnp.minimum(begin + each, stop)
