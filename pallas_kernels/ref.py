"""Paged KV write and causal attention in plain XLA: runs everywhere, and is what every other kernel is compared with.

Two axis orders of the cache: heads-major `[L, P, K, S, F]` (a page of one head is contiguous) and tokens-major
`[L, P, S, K, F]`. F = 2 * D: keys, then values. A tile is t consecutive queries of one sequence that share one page gather.

Attention walks the pages in blocks of a fixed number of tokens with an online softmax (Milakov and Gimelshein, 2018) and
stops after the last block any query needs. A block in which a query sees nothing leaves its sums untouched bit for bit
(factor 1, addend 0), so a row's result depends neither on its neighbours' lengths nor on the width of the page table.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rows import Rows
from pallas_kernels.work import LOWEST, visible

BLOCK_TOKENS = 128  # pages are cut and joined to it, so that equal blocks are summed whatever the page size
CACHED_BYTES = 2**21  # what a block gathers, at most: a CPU's cache then still has it when it is multiplied; but
LEAST_BLOCK_TOKENS = 32  # are worth a turn of the loop
WIDE_TILE = 256  # queries; beyond, scores of a block no longer stay in a CPU's cache


def store(
    kv: jax.Array, layer: int | jax.Array, rows: jax.Array, pages: jax.Array, offsets: jax.Array, *, heads_major: bool
) -> jax.Array:
    """Store rows [T, K, F] at (pages i32[T], offsets i32[T]) of one layer of `kv`, which is updated in place when donated.

    `kv` may hold the elements' bits instead (uint16), here and in `attend`: XLA:CPU widens a whole 16-bit float cache to
    float32 around every scatter and gather, and even a bitcast of it is a copy.
    """
    rows = _cast_bits(rows, kv.dtype)
    if heads_major:
        heads = jnp.arange(rows.shape[1])[None, :]  # named one by one: XLA:TPU copies the cache for a slice in between
        return kv.at[layer, pages[:, None], heads, offsets[:, None]].set(rows, mode="drop")
    return kv.at[layer, pages, offsets].set(rows, mode="drop")


def attend(
    q: jax.Array,
    kv: jax.Array,
    layer: int | jax.Array,
    page_tables: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    window: int | None,
    heads_major: bool,
    dtype: jnp.dtype,
    block_tokens: int = BLOCK_TOKENS,
    scales: jax.Array | None = None,
) -> jax.Array:
    """Attention of q [T, H, D] at positions i32[T] over the pages of their tiles, page_tables i32[N, M]; returns [T, H, D].

    Query at i sees key j when j <= i and, with a window, i - j < window. Whatever is stored elsewhere, NaN included, has no
    effect. Scores and sums are float32; probabilities are rounded to `dtype`, the cache's, before they meet the values.

    An int8 cache has `scales` float32 like `kv` with F = 2, for keys and for values. Its integers are exact in every `dtype`,
    in which they are multiplied; the scales meet scores and probabilities, so no dequantised copy of anything exists.
    """
    num_tiles = page_tables.shape[0]
    tile = q.shape[0] // num_tiles
    num_heads, dim = q.shape[1:]
    num_kv_heads, page_size = (kv.shape[2], kv.shape[3]) if heads_major else (kv.shape[3], kv.shape[2])
    group = num_heads // num_kv_heads
    block_tokens = _cached_tokens(block_tokens, num_tiles * num_kv_heads * kv.shape[-1] * jnp.dtype(dtype).itemsize)
    part = math.gcd(page_size, block_tokens)  # tokens; pages are cut into parts that a block takes whole
    parts, block_parts = page_size // part, block_tokens // part
    tables = (page_tables[:, :, None] * parts + jnp.arange(parts)[None, None, :]).reshape(num_tiles, -1)
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % block_parts)))
    at = positions.reshape(num_tiles, tile)
    grouped = q.reshape(num_tiles, tile, num_kv_heads, group, dim)
    queries = grouped.transpose(0, 2, 1, 3, 4).reshape(num_tiles, num_kv_heads, tile * group, dim).astype(dtype)

    # GPU and TPU would silently round float32 operands.
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32, precision="highest" if dtype == jnp.float32 else None)

    def step(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, sums = carry
        pages = lax.dynamic_slice_in_dim(tables, index * block_parts, block_parts, axis=1)
        both = _read_as(_gather(kv, layer, pages, parts, heads_major=heads_major), dtype)
        keys, values = both[..., :dim], both[..., dim:]
        keys_at = index * block_tokens + jnp.arange(block_tokens)
        seen = visible(at[:, :, None] - keys_at[None, None, :], window)  # bool[N, t, block]
        rows = jnp.broadcast_to(seen[:, :, None], (num_tiles, tile, group, block_tokens))
        rows = rows.reshape(num_tiles, 1, tile * group, block_tokens)
        scores = dot("nkqd,nkjd->nkqj", queries, keys) * scale
        of_values = None
        if scales is not None:
            of_both = _gather(scales, layer, pages, parts, heads_major=heads_major)
            of_keys, of_values = jnp.moveaxis(of_both, -1, 0)[:, :, :, None]
            scores = scores * of_keys
        scores = jnp.where(rows, scores, LOWEST)
        new_largest = jnp.maximum(largest, scores.max(axis=-1))
        weights = jnp.where(rows, jnp.exp(scores - new_largest[..., None]), 0.0)
        shrink = jnp.exp(largest - new_largest)
        values = jnp.where(seen.any(axis=1)[:, None, :, None], values, jnp.zeros((), dtype))
        scaled = weights if of_values is None else jnp.where(rows, weights * of_values, 0.0)
        new = dot("nkqj,nkjd->nkqd", scaled.astype(dtype), values)
        return new_largest, total * shrink + weights.sum(axis=-1), sums * shrink[..., None] + new

    shape = queries.shape[:-1]
    start = (jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(queries.shape, jnp.float32))
    _, total, sums = lax.fori_loop(0, positions.max() // block_tokens + 1, step, start)
    out = sums / total[..., None]
    out = out.reshape(num_tiles, num_kv_heads, tile, group, dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(q.shape).astype(q.dtype)


def attend_tiles(  # noqa: PLR0917
    q: jax.Array,
    kv: jax.Array,
    layer: int | jax.Array,
    page_tables: jax.Array,
    positions: jax.Array,
    rows: Rows,
    **options: Any,
) -> jax.Array:
    """`attend`, with tiles joined to wide ones where no row begins within a wide one: a long chunk of one prompt.

    Tiles of one row share its page table, so its pages are gathered once and not by every tile. `rows` are the same queries.
    Padding behind a row is at position 0, which is then a key of the row itself.
    """
    num_tiles = page_tables.shape[0]
    tile = q.shape[0] // num_tiles
    joined = _most_joined(num_tiles, tile)
    if tile == 1 or joined == 1:
        return attend(q, kv, layer, page_tables, positions, **options)
    alone = jnp.all((rows.counts == 0) | (rows.starts % (joined * tile) == 0))
    return lax.cond(
        alone,
        lambda: attend(q, kv, layer, page_tables[::joined], positions, **options),
        lambda: attend(q, kv, layer, page_tables, positions, **options),
    )


def _most_joined(num_tiles: int, tile: int) -> int:
    """Tiles of one wide tile: as many as make WIDE_TILE queries at most, and divide all."""
    return max(n for n in range(1, num_tiles + 1) if num_tiles % n == 0 and (n == 1 or n * tile <= WIDE_TILE))


def _cached_tokens(most: int, token_bytes: int) -> int:
    """The stride: `most` tokens, or the half, or the half of that .. ; all tiles together gather `token_bytes` for a token."""
    while most * token_bytes > CACHED_BYTES and most >= 2 * LEAST_BLOCK_TOKENS:
        most //= 2
    return most


def _gather(kv: jax.Array, layer: int | jax.Array, pages: jax.Array, parts: int, *, heads_major: bool) -> jax.Array:
    """Rows [N, K, B * S / parts, F], as they are stored, of i32[N, B]: pages * parts + which of the page's equal parts."""
    num_layers, num_pages = kv.shape[:2]
    num_tiles, num_blocks = pages.shape
    if heads_major:  # one contiguous [S, F] slice per head and page: no transpose afterwards
        heads, size, features = kv.shape[2:]
        flat = kv.reshape(num_layers * num_pages * heads * parts, size // parts, features)
        first = (layer * num_pages + pages // parts) * heads * parts + pages % parts
        rows = flat.at[first[:, None, :] + jnp.arange(heads)[None, :, None] * parts].get(mode="clip")
    else:
        size, heads, features = kv.shape[2:]
        flat = kv.reshape(num_layers * num_pages * parts, size // parts, heads, features)
        rows = flat.at[layer * num_pages * parts + pages].get(mode="clip").transpose(0, 3, 1, 2, 4)
    return rows.reshape(num_tiles, heads, num_blocks * (size // parts), features)


def _read_as(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Elements or their bits as `dtype`; integers of a quantised cache by value."""
    return x.astype(dtype) if x.dtype == jnp.int8 else _cast_bits(x, dtype)


def _cast_bits(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
