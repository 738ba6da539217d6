"""Arranges attention for the GPU kernel: what it refuses, its work list, and the join of keys that were split over programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpu_blocks import gpu_blocks_by_rule
from pallas_kernels.gpu_triton import GpuShape, attend_items
from pallas_kernels.implementation import Shaped
from pallas_kernels.rows import Rows
from pallas_kernels.work import Work, plan_work

_ROW_LIMIT = 2**31
_MOST_GROUP = 128


def gpu_refuses(q: Shaped, kv: Shaped, *, dtype: jnp.dtype, heads_major: bool) -> str | None:
    """Why the GPU kernel cannot serve these arrays (shapes and dtypes are looked at), or None."""
    if heads_major:
        return "pages are [K, S, F], wanted tokens-major pages [S, K, F]"
    if kv.dtype not in (jnp.float32, jnp.bfloat16, jnp.int8) or dtype not in (jnp.float32, jnp.bfloat16):
        return f"kv {kv.dtype} multiplied in {dtype}, wanted float32, bfloat16, or int8 multiplied in one of them"
    if kv.shape[4] != 2 * q.shape[2]:
        return f"features {kv.shape[4]} of kv and {q.shape[2]} of q, wanted twice as many in kv"
    if q.shape[1] // kv.shape[3] > _MOST_GROUP:
        return f"{q.shape[1]} query heads for {kv.shape[3]} kv heads, wanted at most {_MOST_GROUP} for each"
    num_rows = kv.shape[0] * kv.shape[1] * kv.shape[2] * kv.shape[3]
    if num_rows >= _ROW_LIMIT:
        return f"{num_rows} rows of kv, wanted fewer than {_ROW_LIMIT}: set --num-pages"
    if kv.dtype == jnp.int8 and _ROW_LIMIT < num_rows * kv.shape[4] <= 2 * _ROW_LIMIT:
        # Pallas' lowering to Triton counts elements in 32 bits up to 2**32 bytes, and they have a sign.
        return (
            "an int8 cache of 2 to 4 GiB, which the compiler addresses wrongly, wanted a smaller or larger one: set --num-pages"
        )
    return None


def attend_gpu(
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
    interpret: Any,
) -> jax.Array:
    """Attention of q [T, H, D] over kv [L, P, S, K, F]. What belongs to no row is undefined, and so is,
    when decoding, what belongs to a row but is not its first query."""
    _, num_pages, page_size, num_kv_heads, features = kv.shape
    num_queries, num_heads, dim = q.shape
    queries = q.astype(dtype)
    max_keys = page_tables.shape[1] * page_size
    blocks = gpu_blocks_by_rule(kv=kv, q=queries, decode=decode, num_rows=page_tables.shape[0], max_keys=max_keys)
    tile = 1 if decode else blocks.rows // (num_heads // num_kv_heads)
    if decode:
        work = _work_of_rows(rows, key_block=blocks.keys, window=window)
    else:
        work = plan_work(rows, num_queries=num_queries, query_block=tile, key_block=blocks.keys, window=window)
    shape = GpuShape(
        blocks=blocks,
        num_items=work.row.shape[0],
        tile=tile,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dim=dim,
        num_pages=num_pages,
        page_size=page_size,
        window=window,
        scale=scale,
        compute_dtype=dtype,
        out_dtype=q.dtype,
    )
    out = attend_items(
        work.packed,
        page_tables,
        layer.reshape(1),
        queries.reshape(num_queries * num_heads, dim),
        kv.reshape(-1, features),
        None if scales is None else scales.reshape(-1, 2),
        shape=shape,
        interpret=interpret,
    )
    return out[0].reshape(q.shape) if blocks.splits == 1 else _joined(out, q)


def _work_of_rows(rows: Rows, *, key_block: int, window: int | None) -> Work:
    """Every row is an item, an empty one without keys: their number does not depend on how many queries there are."""
    full = rows.counts > 0
    at = rows.lengths - 1
    nothing = jnp.zeros_like(at)
    first = nothing if window is None else jnp.maximum(at - window + 1, 0) // key_block
    return Work(
        row=jnp.arange(at.shape[0], dtype=jnp.int32),
        block=rows.starts,
        offset=at,
        low=nothing,
        high=full.astype(jnp.int32),
        first=jnp.where(full, first, nothing),
        stop=jnp.where(full, at // key_block + 1, nothing),
        num_items=jnp.sum(full),
    )


def _joined(parts: tuple[jax.Array, ...], q: jax.Array) -> jax.Array:
    """[T, H, D] of the sums of all splits; one without keys has total 0 and does not count."""
    sums, largest, total = (part.reshape(-1, *q.shape[:2], *part.shape[1:]) for part in parts)  # [splits, T, H] and D
    weights = jnp.exp2(largest - largest.max(axis=0, keepdims=True))
    total = (total * weights).sum(axis=0)
    out = (sums * weights[..., None]).sum(axis=0) / jnp.where(total > 0, total, 1.0)[..., None]
    return out.astype(q.dtype)
