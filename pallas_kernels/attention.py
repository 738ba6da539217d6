"""Ragged paged attention: one signature, decode, chunked prefill and mixed batches in one call.

    attend(q, kv, layer, page_tables, rows, scale=.., window=.., heads_major=.., implementation=..)

`ref` is plain XLA and runs everywhere; `tpu` wants heads-major pages of whole registers (`tpu_refuses` says what is wrong),
`gpu` tokens-major ones (`gpu_refuses`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import ref
from pallas_kernels.attention_shape import LANES, Shape
from pallas_kernels.blocks import Blocks, BlockTable, blocks_by_rule
from pallas_kernels.gpu_attention import attend_gpu, gpu_refuses
from pallas_kernels.implementation import Implementation, Refused, Shaped
from pallas_kernels.rows import Kind, Rows
from pallas_kernels.tpu_attention import attend_blocks
from pallas_kernels.work import plan_work

REF_TILE = 16  # queries that share a gather of their pages
MOST_PAGES = 2**16  # entries of a page table: two tables are half of the smallest scalar memory
_SUBLANES = 8


def attend(
    q: jax.Array,
    kv: jax.Array,
    layer: int | jax.Array,
    page_tables: jax.Array,
    rows: Rows,
    *,
    scale: float,
    window: int | None,
    heads_major: bool,
    scales: jax.Array | None = None,
    kind: Kind = Kind.MIXED,
    implementation: Implementation = "ref",
    dtype: jnp.dtype | None = None,
    table: BlockTable | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of q [T, H, D], whose rows are `rows`, over the pages of page_tables i32[B, M]; returns [T, H, D].

    The query at position i of its row sees key j when j <= i and, with a window, i - j < window. Queries of no row come back
    as zeros. Whatever pages hold that no query sees, NaN included, has no effect. Scores and sums are float32.

    kv is [L, P, K, S, 2 * D] (heads-major) or [L, P, S, K, 2 * D]: float32, bfloat16, or int8 with `scales` float32 of the same
    shape with a last axis of 2, for keys and for values. `dtype` is what products are made in, by default kv's, for
    int8 q's. `ref` takes 16-bit floats as their bits (uint16) too, and then needs `dtype`.
    `table` overrides the rule for block sizes of `tpu`; `interpret` is passed to Pallas. Raises Refused for what it cannot do
    (see `tpu_refuses`, `gpu_refuses`).
    """
    dtype = dtype or (q.dtype if kv.dtype == jnp.int8 else kv.dtype)
    layer = jnp.asarray(layer, jnp.int32)
    if implementation == "ref":
        out = _attend_ref(
            q,
            kv,
            layer,
            page_tables,
            rows,
            kind,
            scale=scale,
            window=window,
            heads_major=heads_major,
            dtype=dtype,
            scales=scales,
        )
        return _without_gaps(out, rows, None)
    if implementation == "gpu":
        kernel: Any = attend_gpu
        reason = gpu_refuses(q, kv, dtype=dtype, heads_major=heads_major)
    else:
        kernel = partial(_attend_tpu, table=table)
        reason = tpu_refuses(q, kv, page_tables, dtype=dtype, heads_major=heads_major, interpreted=bool(interpret))
    if reason:
        raise Refused(f"paged attention for {implementation.upper()}: {reason}")
    pages = jnp.clip(page_tables, 0, kv.shape[1] - 1)  # a copy from a page that does not exist would not be noticed
    run = partial(
        kernel,
        q,
        kv,
        layer,
        pages,
        scales=scales,
        scale=scale,
        window=window,
        dtype=dtype,
        interpret=interpret,
    )
    if kind is not Kind.MIXED:
        return _without_gaps(run(rows, decode=kind is Kind.DECODE), rows, None)
    single = rows.counts == 1
    one, many = (_only(rows, chosen) for chosen in (single, ~single))
    decoded, prefilled = run(one, decode=True), run(many, decode=False)
    return _without_gaps(_without_gaps(prefilled, many, decoded), rows, None)


def tpu_refuses(
    q: Shaped, kv: Shaped, page_tables: Shaped, *, dtype: jnp.dtype, heads_major: bool, interpreted: bool = False
) -> str | None:
    """Why the TPU kernel cannot serve these arrays (shapes and dtypes are looked at), or None."""
    if not heads_major:
        return "pages are [S, K, F], wanted heads-major pages [K, S, F]"
    page_size, features = kv.shape[3:]
    if kv.dtype not in (jnp.float32, jnp.bfloat16, jnp.int8) or dtype not in (jnp.float32, jnp.bfloat16):
        return f"kv {kv.dtype} multiplied in {dtype}, wanted float32, bfloat16, or int8 multiplied in one of them"
    if features != 2 * q.shape[2]:
        return f"features {features} of kv and {q.shape[2]} of q, wanted twice as many in kv"
    if interpreted:
        return None
    if features % LANES:
        return f"head dimension {q.shape[2]}, wanted a multiple of {LANES // 2}"
    wanted = LANES if kv.dtype == jnp.int8 else _SUBLANES * 4 // kv.dtype.itemsize
    if page_size % wanted:
        return f"pages of {page_size} tokens of {kv.dtype}, wanted a multiple of {wanted}: set --page-size"
    if page_tables.shape[1] > MOST_PAGES:
        return f"page tables of {page_tables.shape[1]} entries, wanted at most {MOST_PAGES}: set --page-size"
    return None


def _attend_ref(  # noqa: PLR0917
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    page_tables: jax.Array,
    rows: Rows,
    kind: Kind,
    *,
    dtype: jnp.dtype,
    **options: Any,
) -> jax.Array:
    """Items of the work list become tiles of `ref.attend`, of which queries that are not the item's attend for nothing."""
    tile = 1 if kind is Kind.DECODE else min(REF_TILE, q.shape[0])
    num_queries = q.shape[0]
    work = plan_work(rows, num_queries=num_queries, query_block=tile, key_block=ref.BLOCK_TOKENS, window=options["window"])
    index = work.block[:, None] * tile + jnp.arange(tile)[None, :]  # i32[W, t] into T
    inside = jnp.arange(tile)[None, :]
    mine = (inside >= work.low[:, None]) & (inside < work.high[:, None])
    positions = jnp.where(mine, work.offset[:, None] + inside, 0)
    tiles = q[jnp.minimum(index, num_queries - 1)].reshape(-1, *q.shape[1:])
    out = ref.attend(tiles, kv, layer, page_tables[work.row], positions.reshape(-1), dtype=dtype, **options)
    return jnp.zeros_like(q).at[jnp.where(mine, index, num_queries).reshape(-1)].set(out, mode="drop")


def _attend_tpu(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    page_tables: jax.Array,
    rows: Rows,
    *,
    decode: bool,
    scales: jax.Array | None,
    scale: float,
    window: int | None,
    dtype: jnp.dtype,
    table: BlockTable | None,
    interpret: Any,
) -> jax.Array:
    """Arrange the arrays as the kernel wants them."""
    num_layers, num_pages, num_kv_heads, page_size, features = kv.shape
    num_queries, num_heads, dim = q.shape
    rule = blocks_by_rule if table is None else table.blocks
    blocks: Blocks = rule(kv=kv, q=q, decode=decode, max_pages=page_tables.shape[1])
    group, tile = num_heads // num_kv_heads, blocks.queries
    heads = next(
        h for h in range(1, num_kv_heads + 1) if num_kv_heads % h == 0 and (h * tile * group >= _SUBLANES or h == num_kv_heads)
    )
    shape = Shape(
        num_groups=num_kv_heads // heads,
        heads=heads,
        group=group,
        query_block=tile,
        block_pages=blocks.pages,
        page_size=page_size,
        features=features,
        dim=dim if dim % LANES == 0 else features,
        window=window,
        scale=scale,
        compute_dtype=dtype,
        quantised=scales is not None,
    )
    tables = jnp.pad(page_tables, ((0, 0), (0, -page_tables.shape[1] % blocks.pages)))
    work = plan_work(rows, num_queries=num_queries, query_block=tile, key_block=shape.key_block, window=window)
    num_blocks = -(-num_queries // tile)
    padded = jnp.pad(q.astype(dtype), ((0, num_blocks * tile - num_queries), (0, 0), (0, 0)))
    split = padded.reshape(num_blocks, tile, num_heads, dim).swapaxes(1, 2)
    out = attend_blocks(
        split.reshape(num_blocks, shape.num_groups, shape.query_rows, dim),
        kv.reshape(num_layers, num_pages, shape.num_groups, heads * page_size, features),
        layer,
        tables,
        work,
        None if scales is None else scales.reshape(*kv.shape[:2], shape.num_groups, heads, page_size, 2).swapaxes(-1, -2),
        shape=shape,
        interpret=interpret,
    )
    values = out[..., shape.value_dim - dim :].reshape(num_blocks, num_heads, tile, dim).swapaxes(1, 2)
    return values.reshape(num_blocks * tile, num_heads, dim)[:num_queries].astype(q.dtype)


def _only(rows: Rows, chosen: jax.Array) -> Rows:
    return Rows(starts=rows.starts, counts=jnp.where(chosen, rows.counts, 0), lengths=rows.lengths)


def _without_gaps(out: jax.Array, rows: Rows, instead: jax.Array | None) -> jax.Array:
    """`out` with what belongs to no row replaced by `instead` (zeros)."""
    index = jnp.arange(out.shape[0])
    row = jnp.searchsorted(lax.cummax(rows.stops), index, side="right", method="compare_all")
    row = jnp.minimum(row, rows.starts.shape[0] - 1)
    mine = (index >= rows.starts[row]) & (index < rows.stops[row])
    return jnp.where(mine[:, None, None], out, jnp.zeros((), out.dtype) if instead is None else instead)
