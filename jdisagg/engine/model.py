"""The model as the steps see it: two pure functions with everything but parameters, cache and batch bound."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jdisagg.core.config import LayerLoop
from jdisagg.models import decoder
from jdisagg.models.batch import AttentionOps, TokenBatch
from jdisagg.models.decoder import KV, Params
from jdisagg.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """`jdisagg.models.decoder` for one spec, one set of kernels and one layer loop."""

    spec: ModelSpec
    ops: AttentionOps
    layer_loop: LayerLoop

    def forward(self, params: Params, kv: KV, batch: TokenBatch) -> tuple[KV, jax.Array]:
        """Write the tokens' KV; returns (kv, hidden [T, E])."""
        return decoder.forward(params, self.spec, kv, batch, self.ops, layer_loop=self.layer_loop)

    def abstract_hidden(self, params: Params, num_tokens: int) -> jax.ShapeDtypeStruct:
        """What `forward` returns of T tokens, [T, E]."""
        return jax.ShapeDtypeStruct((num_tokens, self.spec.embed), params["embed_tokens"]["embedding"].dtype)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """f32[R, V] of hidden rows [R, E]."""
        return decoder.logits(params, self.spec, hidden)
