"""The textbook attention that the engine's kernels are measured against: gather the whole page table, then one softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jdisagg.kv.group import KVGroup
from jdisagg.models.batch import TokenBatch

_HIDDEN = -1e30


class PlainOps:
    """`AttentionOps` over a tokens-major cache [L, P, S, K, F] of one device, decode only: every token is a tile."""

    def write(self, kv: KVGroup, layer: int | jax.Array, k: jax.Array, v: jax.Array, batch: TokenBatch) -> KVGroup:
        """Store k, v [T, K, D] in the batch's pages."""
        rows = jnp.concatenate([k, v], axis=-1).astype(kv.data.dtype)
        return KVGroup(kv.data.at[layer, batch.write_pages, batch.write_offsets].set(rows))

    def attend(
        self, q: jax.Array, kv: KVGroup, layer: int | jax.Array, batch: TokenBatch, *, scale: float, window: int | None
    ) -> jax.Array:
        """Attention of q [T, H, D] over all pages of page_tables [T, M]."""
        assert window is None, "the measured model has no window"
        tokens, num_heads, dim = q.shape
        pages = kv.data[layer][batch.page_tables]  # [T, M, S, K, F]
        rows = pages.reshape(tokens, -1, *pages.shape[3:])
        keys, values = rows[..., :dim], rows[..., dim:]
        grouped = q.reshape(tokens, rows.shape[2], -1, dim)
        scores = jnp.einsum("tkgd,tjkd->tkgj", grouped, keys, preferred_element_type=jnp.float32) * scale
        seen = jnp.arange(rows.shape[1])[None, :] <= batch.positions[:, None]
        weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, _HIDDEN), axis=-1).astype(q.dtype)
        out = jnp.einsum("tkgj,tjkd->tkgd", weights, values, preferred_element_type=jnp.float32)
        return out.astype(q.dtype).reshape(tokens, num_heads, dim)
