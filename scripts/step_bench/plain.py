"""The textbook step that the engine's is measured against: one scan over layers, the whole page table gathered, one softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.kv.group import KVGroup
from jdisagg.models.batch import TokenBatch
from jdisagg.models.decoder import KV, DecoderModel, Params, block
from jdisagg.models.layers import angles, rms_norm

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


class ScannedModel(DecoderModel):
    """Layers and their caches are the scan's inputs, new caches its outputs."""

    def forward(self, params: Params, kv: KV, batch: TokenBatch) -> tuple[KV, jax.Array]:
        """See DecoderModel; layers are stacked, and none has a window."""
        turn = angles(self.spec.rope, batch.positions)

        def body(x: jax.Array, layer: tuple[Params, jax.Array]) -> tuple[jax.Array, jax.Array]:
            own = KVGroup(layer[1][None])
            own, x = block(layer[0], own, 0, x, batch, spec=self.spec, ops=self.ops, turn=turn, window=None)
            return x, own.data[0]

        x = jnp.take(params["embed_tokens"]["embedding"], batch.token_ids, axis=0)
        x, data = lax.scan(body, x, (params["layers"], kv[0].data))
        return (KVGroup(data),), rms_norm(params["norm"], x, self.spec.norm_eps)
