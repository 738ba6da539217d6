"""Ragged paged attention for TPU: a grid over a work list, pages copied from HBM one block of keys ahead.

    item w    | copy block j + 1, or item w + 1's first -> other buffer | wait for j | scores, online softmax, sums |

The cache is seen as [L, P, G, K/G * S, F]: per page G parts, each a matrix of (head, token) rows. The query heads of a part
meet all its rows in one product, and rows of other heads are masked: a part is one head unless a single query would leave most
of a register empty, as in decoding. Copies never pause between items: whose turn a buffer is goes on from one to the next.

Features in halves that are not whole registers (D = 64) are never cut: q is widened with zeros to F, whole rows are multiplied
by the probabilities, and the caller takes the upper half.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention_shape import LANES, Shape
from pallas_kernels.loops import arrive, loop
from pallas_kernels.tpu_copies import Copies, Stream
from pallas_kernels.work import BLOCK, FIRST, HIGH, LOW, LOWEST, OFFSET, STOP, Work, visible

_NOWHERE = -(2**30)  # position of a query that sees nothing
_LATENCY_ROWS = 64  # parts with more rows keep a chip busy one by one, and would take long to compile side by side


def attend_blocks(  # noqa: PLR0917
    q: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    page_tables: jax.Array,
    work: Work,
    scales: jax.Array | None,
    *,
    shape: Shape,
    interpret: Any,
) -> jax.Array:
    """Sums of q [N, G, query_rows, D] over cache [L, P, G, heads * S, F]; returns [N, G, query_rows, value_dim].

    page_tables i32[B, M], M whole blocks of keys, every entry a page that exists. scales f32[L, P, G, heads, 2, S]: of keys,
    then of values, tokens along lanes as scores have them. What belongs to no item is undefined.
    """
    block = (1, shape.num_groups, shape.query_rows)
    tables = jnp.pad(page_tables, ((0, 0), (0, -page_tables.shape[1] % LANES)))[:, None]
    sources = [cache] if scales is None else [cache, scales]
    buffers = [pltpu.VMEM((2, shape.block_pages, *source.shape[2:]), source.dtype) for source in sources]
    scratch: list[Any] = [
        pltpu.SMEM((2, *tables.shape[1:]), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM((shape.num_groups, shape.query_rows, LANES), jnp.float32),
        pltpu.VMEM((shape.num_groups, shape.query_rows, LANES), jnp.float32),
        pltpu.VMEM((shape.num_groups, shape.query_rows, shape.value_dim), jnp.float32),
    ]
    return pl.pallas_call(
        partial(_kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(jnp.maximum(work.num_items, 1),),  # a grid of no steps is not something to rely on
            in_specs=[
                pl.BlockSpec((*block, q.shape[-1]), lambda item, work, *_: (work[BLOCK, item], 0, 0, 0)),
                *[pl.BlockSpec(memory_space=pl.ANY)] * (1 + len(sources)),
            ],
            out_specs=pl.BlockSpec((*block, shape.value_dim), lambda item, work, *_: (work[BLOCK, item], 0, 0, 0)),
            scratch_shapes=scratch + [part for buffer in buffers for part in (buffer, pltpu.SemaphoreType.DMA((2,)))],
        ),
        out_shape=jax.ShapeDtypeStruct((*q.shape[:-1], shape.value_dim), q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=shape.vmem_limit_bytes),
        interpret=interpret,
        name="ragged_paged_decode" if shape.query_block == 1 else "ragged_paged_prefill",
    )(work.packed, work.num_items.reshape(1), layer.reshape(1), q, tables, *sources)


def _kernel(  # noqa: PLR0917
    work: Any,
    num_items: Any,
    layer: Any,
    q: Any,
    tables: Any,
    cache: Any,
    *rest: Any,
    shape: Shape,
) -> None:
    """One item: refs in SMEM (work, num_items, layer), VMEM (q, out, scratch) and HBM (tables, cache, scales)."""
    sources, rest = ((cache, rest[0]), rest[1:]) if shape.quantised else ((cache,), rest)
    out, slots, slot_semaphores, largest, total, sums, *buffers = rest
    streams = tuple(
        Stream(pages=source, buffers=buffers[2 * index], semaphores=buffers[2 * index + 1])
        for index, source in enumerate(sources)
    )
    copies = Copies(
        work=work,
        layer=layer,
        tables=tables,
        slots=slots,
        slot_semaphores=slot_semaphores,
        streams=streams,
        block_pages=shape.block_pages,
    )
    item = pl.program_id(0)
    first, stop, low, high = (work[field, item] for field in (FIRST, STOP, LOW, HIGH))

    @pl.when((item == 0) & (num_items[0] > 0))
    def _() -> None:
        copies.start_table(item)
        copies.start_item(item)

    @pl.when(item + 1 < num_items[0])
    def _() -> None:
        copies.start_table(item + 1)

    largest[...] = jnp.full_like(largest, LOWEST)
    total[...] = jnp.zeros_like(total)
    sums[...] = jnp.zeros_like(sums)

    def step(number: jax.Array, _: None) -> None:
        @pl.when(number + 1 < stop)
        def _() -> None:
            copies.start(item, number + 1)

        @pl.when((number + 1 == stop) & (item + 1 < num_items[0]))
        def _() -> None:
            copies.start_item(item + 1)

        here = work[OFFSET, item] - number * shape.key_block  # of query 0, counted from the block's first key
        buffer = copies.buffer(item, number)

        def use() -> None:
            block, *scales = (stream.buffers.at[buffer] for stream in streams)
            online = partial(_part, q, block, scales, (here, low, high), (largest, total, sums), shape=shape)
            loop(shape.num_groups, online, written_out=shape.query_rows <= _LATENCY_ROWS)

        arrive(lambda: copies.wait(item, number), use)

    lax.fori_loop(first, stop, step, None)
    query = jnp.broadcast_to(_query_of_row(shape)[0], (shape.query_rows, shape.value_dim))
    mine = (query >= low) & (query < high)

    def finish(part: jax.Array) -> None:
        out[0, part] = jnp.where(mine, sums[part] / total[part][:, :1], out[0, part].astype(jnp.float32)).astype(out.dtype)

    loop(shape.num_groups, finish, written_out=shape.query_rows <= _LATENCY_ROWS)


def _part(  # noqa: PLR0917
    q: Any,
    buffer: Any,
    scales: Sequence[Any],
    where: tuple[jax.Array, jax.Array, jax.Array],
    state: tuple[Any, Any, Any],
    part: jax.Array,
    *,
    shape: Shape,
) -> None:
    """Add one block of keys to the sums of one part."""
    (here, low, high), (largest, total, sums) = where, state
    precision = lax.Precision.HIGHEST if shape.compute_dtype == jnp.float32 else None
    rows = buffer[:, part].astype(shape.compute_dtype).reshape(shape.key_rows, shape.features)
    whole = shape.dim == shape.features
    keys, values = (rows, rows) if whole else (rows[:, : shape.dim], rows[:, shape.dim :])

    scores = _dot(_widened(q[0, part], shape.dim), keys, transposed=True, precision=precision) * shape.scale
    token, key_head = _place(lax.broadcasted_iota(jnp.int32, (1, shape.key_rows), 1), shape)
    query, query_head = _query_of_row(shape)
    position = jnp.where((query >= low) & (query < high), here + query, _NOWHERE)
    mask = visible(position - token, shape.window)
    if shape.heads > 1:
        mask &= query_head == key_head
    if scales:
        scores = scores * _by_lane(scales[0], part, 0, shape)
    scores = jnp.where(mask, scores, LOWEST)

    before = largest[part][:, :1]
    now = jnp.maximum(before, scores.max(axis=-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores - now), 0.0)
    shrink = jnp.exp(before - now)
    largest[part] = jnp.broadcast_to(now, largest.shape[1:])
    total[part] = total[part] * shrink + weights.sum(axis=-1, keepdims=True)

    if scales:
        weights = jnp.where(mask, weights * _by_lane(scales[0], part, 1, shape), 0.0)
    value_token, _ = _place(lax.broadcasted_iota(jnp.int32, (shape.key_rows, 1), 0), shape)
    value_token = jnp.broadcast_to(value_token, values.shape)
    last, earliest = here + high - 1, here + low
    seen = (last >= value_token) if shape.window is None else (last >= value_token) & (earliest - value_token < shape.window)
    new = _dot(weights.astype(shape.compute_dtype), _clean(values, seen), transposed=False, precision=precision)
    sums[part] = sums[part] * shrink + new


def _clean(values: jax.Array, seen: jax.Array) -> jax.Array:
    """Values of keys that no query sees are zeros: 0 * NaN is NaN."""
    return jnp.where(seen, values, jnp.zeros((), values.dtype))


def _widened(rows: jax.Array, features: int) -> jax.Array:
    """[rows, features], zeros to the right: here, since in HBM it would be an array more of the step's queries."""
    missing = features - rows.shape[1]
    return jnp.concatenate([rows, jnp.zeros((rows.shape[0], missing), rows.dtype)], axis=1) if missing else rows


def _by_lane(scales: Any, part: jax.Array, half: int, shape: Shape) -> jax.Array:
    """f32[1, key_rows] of a block's scales [pages, G, heads, 2, S]."""
    rows = [scales[page, part, head, half : half + 1] for page in range(shape.block_pages) for head in range(shape.heads)]
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)


def _place(row: jax.Array, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """(token within the block of keys, head within the part) of rows of a part."""
    per_page = shape.heads * shape.page_size
    inside = lax.rem(row, per_page)
    return row // per_page * shape.page_size + lax.rem(inside, shape.page_size), inside // shape.page_size


def _query_of_row(shape: Shape) -> tuple[jax.Array, jax.Array]:
    """(query within the block, head within the part) of a part's rows, i32[query_rows, 1]: divided once, not for every key."""
    row = lax.broadcasted_iota(jnp.int32, (shape.query_rows, 1), 0)
    per_head = shape.query_block * shape.group
    return lax.rem(row, shape.query_block), row // per_head


def _dot(a: jax.Array, b: jax.Array, *, transposed: bool, precision: lax.Precision | None) -> jax.Array:
    contract = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)
