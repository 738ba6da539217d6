"""The model as the steps see it: two pure functions with everything but parameters, cache and batch bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jdisagg.core.config import LayerLoop
from jdisagg.kv.group import KVGroup
from jdisagg.models import decoder
from jdisagg.models.batch import AttentionOps, TokenBatch
from jdisagg.models.spec import ModelSpec

Params = Mapping[str, Any]
KV = tuple[KVGroup, ...]


class StepModel(Protocol):
    """What a step runs."""

    def forward(self, params: Params, kv: KV, batch: TokenBatch) -> tuple[KV, jax.Array]:
        """Write the tokens' KV; returns (kv, hidden [T, E])."""
        ...

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """f32[R, V] of hidden rows [R, E]."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """`jdisagg.models.decoder` for one spec, one set of kernels and one layer loop."""

    spec: ModelSpec
    ops: AttentionOps
    layer_loop: LayerLoop

    def forward(self, params: Params, kv: KV, batch: TokenBatch) -> tuple[KV, jax.Array]:
        """See StepModel."""
        return decoder.forward(params, self.spec, kv, batch, self.ops, layer_loop=self.layer_loop)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """See StepModel."""
        return decoder.logits(params, self.spec, hidden)
