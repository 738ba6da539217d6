"""KV of tokens out of pages and back, for transfers: one signature, implementations `ref` and `gpu` (XLA) and `tpu`.

pages i32[N] hold tokens [0, N * S) of somebody; outside of them KV is rows [L, N * S, K, F], in whatever dtype travels.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import Implementation, Refused
from pallas_kernels.tpu_gather import gather_pages
from pallas_kernels.tpu_scatter import scatter_pages
from pallas_kernels.write import tpu_write_refuses


def gather(
    kv: jax.Array,
    pages: jax.Array,
    *,
    heads_major: bool,
    dtype: Any = None,
    scales: jax.Array | None = None,
    implementation: Implementation = "ref",
    interpret: Any = False,
) -> jax.Array:
    """Rows [L, N * S, K, F] of pages i32[N], as `dtype` (default: as they are). Pages that do not exist read as another one.

    kv is [L, P, K, S, F] (heads-major) or [L, P, S, K, F]. Integers are multiplied by `scales` (float32, kv's shape with a last
    axis of 2: keys, values) where these are given; without them they keep their numbers.
    Raises Refused for what `tpu` cannot do.
    """
    dtype = jnp.dtype(dtype or (jnp.float32 if scales is not None else kv.dtype))
    pages = jnp.clip(pages, 0, kv.shape[1] - 1)
    if implementation == "tpu":
        _check(kv, heads_major=heads_major, interpret=interpret)
        taken = gather_pages(kv, pages, dtype=kv.dtype if scales is not None else dtype, interpret=interpret)
    else:
        taken = kv[:, pages] if scales is not None else kv[:, pages].astype(dtype)
    rows = _as_rows(taken, heads_major=heads_major)
    if scales is None:
        return rows
    factors = _as_rows(scales[:, pages], heads_major=heads_major)
    halves = rows.astype(jnp.float32).reshape(*rows.shape[:-1], 2, -1) * factors[..., None]
    return halves.reshape(rows.shape).astype(dtype)


def scatter(
    kv: jax.Array,
    rows: jax.Array,
    pages: jax.Array,
    begin: int | jax.Array,
    end: int | jax.Array,
    *,
    heads_major: bool,
    implementation: Implementation = "ref",
    interpret: Any = False,
) -> jax.Array:
    """`kv` with tokens [begin, end) of rows [L, N * S, K, F], cast to its dtype, in pages i32[N]; in place when donated.

    Pages are distinct where they hold any of these tokens; others may be the null page, and are not touched.
    Raises Refused for what `tpu` cannot do.
    """
    if implementation == "tpu":
        _check(kv, heads_major=heads_major, interpret=interpret)
    span = jnp.stack([jnp.asarray(begin, jnp.int32), jnp.asarray(end, jnp.int32)])
    page_size = kv.shape[3 if heads_major else 2]
    cut = rows.reshape(rows.shape[0], pages.shape[0], page_size, *rows.shape[2:])
    if implementation == "tpu":
        return scatter_pages(kv, cut.swapaxes(2, 3), pages, span, interpret=interpret)
    token = jnp.arange(rows.shape[1], dtype=jnp.int32)
    inside = (token >= span[0]) & (token < span[1])
    where = jnp.where(inside, jnp.repeat(pages, page_size), kv.shape[1])
    layers, heads = jnp.arange(kv.shape[0])[:, None, None], jnp.arange(rows.shape[2])[None, None, :]
    where, offset = where[None, :, None], (token % page_size)[None, :, None]
    index = (layers, where, heads, offset) if heads_major else (layers, where, offset, heads)
    return kv.at[index].set(rows.astype(kv.dtype), mode="drop")


def _as_rows(pages: jax.Array, *, heads_major: bool) -> jax.Array:
    """[L, N * S, K, F] of pages [L, N, K, S, F] or [L, N, S, K, F]."""
    ordered = pages.swapaxes(2, 3) if heads_major else pages
    return ordered.reshape(ordered.shape[0], -1, *ordered.shape[3:])


def _check(kv: jax.Array, *, heads_major: bool, interpret: Any) -> None:
    if reason := tpu_write_refuses(kv, heads_major=heads_major, interpreted=bool(interpret)):
        raise Refused(f"KV transfer for TPU: {reason}")
