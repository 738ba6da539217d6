"""KV write: rows of tokens into their pages. One signature, implementations `ref` and `gpu` (XLA's scatter) and `tpu`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import ref
from pallas_kernels.attention_shape import LANES
from pallas_kernels.implementation import Implementation, Refused
from pallas_kernels.tpu_write import slab_tokens, store_slabs


def write(
    kv: jax.Array,
    layer: int | jax.Array,
    rows: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    heads_major: bool,
    implementation: Implementation = "ref",
    most_slabs: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Store rows [T, K, F], cast to kv's dtype, at (pages i32[T], offsets i32[T]) of one layer; in place when `kv` is donated.

    kv is [L, P, K, S, F] (heads-major) or [L, P, S, K, F]. Rows for pages that do not exist are left out. Positions are
    distinct, but for those on pages whose content does not matter, such as the null page.

    `tpu` works on slabs of a few consecutive tokens of a page (`slab_tokens`); `most_slabs` is the caller's promise how many
    of them the rows touch, and what is beyond is not written. None promises nothing, and pays for a slab per row.
    Raises Refused for what `tpu` cannot do.
    """
    layer = jnp.asarray(layer, jnp.int32)
    pages = jnp.where(pages < 0, kv.shape[1], pages)  # indices would count them from the end
    if implementation != "tpu":
        return ref.store(kv, layer, rows.astype(kv.dtype), pages, offsets, heads_major=heads_major)
    if reason := tpu_write_refuses(kv, heads_major=heads_major, interpreted=bool(interpret)):
        raise Refused(f"KV write for TPU: {reason}")
    tokens = min(slab_tokens(kv.dtype), kv.shape[3])
    most = min(most_slabs or rows.shape[0], rows.shape[0])
    return store_slabs(kv, layer, rows, pages, offsets, most_slabs=most, tokens=tokens, interpret=interpret)


def tpu_write_refuses(kv: jax.Array, *, heads_major: bool, interpreted: bool = False) -> str | None:
    """Why the TPU kernel cannot write to such an array, or None."""
    if not heads_major:
        return "pages are [S, K, F], wanted heads-major pages [K, S, F]"
    page_size, features = kv.shape[3:]
    tokens = slab_tokens(kv.dtype)
    if page_size % min(tokens, page_size if interpreted else tokens):
        return f"pages of {page_size} tokens of {kv.dtype}, wanted a multiple of {tokens}: set --page-size"
    if features % LANES and not interpreted:
        return f"{features} features, wanted a multiple of {LANES}"
    return None
