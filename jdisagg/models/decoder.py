"""The forward pass: tokens and KV cache in, hidden rows and KV cache out. Pure; `params` is the dict of `declare.build`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.core.config import LayerLoop
from jdisagg.kv.group import KVGroup
from jdisagg.models.batch import AttentionOps, TokenBatch
from jdisagg.models.layers import angles, dot, linear, mlp, rms_norm, rotate
from jdisagg.models.spec import ModelSpec

Params = Mapping[str, Any]
KV = tuple[KVGroup, ...]  # by cache group (length 1 today)
Carry = tuple[KVGroup, jax.Array]  # the cache group and the residual stream


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """The model as the steps see it: pure functions with everything but parameters, cache and batch bound."""

    spec: ModelSpec
    ops: AttentionOps
    layer_loop: LayerLoop  # SCAN wants the layers stacked (`stacking.build_stacked`) and one window for all of them

    def forward(self, params: Params, kv: KV, batch: TokenBatch) -> tuple[KV, jax.Array]:
        """Write the KV of all tokens and return (kv, hidden [T, E] after the last norm)."""
        spec, ops = self.spec, self.ops
        with jax.named_scope("embed"):
            x = jnp.take(params["embed_tokens"]["embedding"], batch.token_ids, axis=0)
        turn = angles(spec.rope, batch.positions)
        group = kv[0]
        if self.layer_loop is LayerLoop.SCAN:
            window = spec.attention.windows[0]

            def body(carry: Carry, layer: tuple[Params, jax.Array]) -> tuple[Carry, None]:
                return block(layer[0], carry[0], layer[1], carry[1], batch, spec=spec, ops=ops, turn=turn, window=window), None

            layers = (params["layers"], jnp.arange(spec.num_layers, dtype=jnp.int32))
            (group, x), _ = lax.scan(body, (group, x), layers)
        else:
            windows = spec.attention.windows
            # Layers alike are traced and lowered once: of 32 on a GPU 0.5 s instead of 2.5 for every executable, at each start.
            # XLA inlines the calls before it does anything else.
            blocks = {window: jax.jit(partial(block, spec=spec, ops=ops, window=window)) for window in set(windows)}
            for index, (layer, window) in enumerate(zip(params["layers"], windows, strict=True)):
                with jax.named_scope(f"layer_{index}"):
                    group, x = blocks[window](layer, group, jnp.int32(index), x, batch, turn=turn)
        with jax.named_scope("norm"):
            return (group,), rms_norm(params["norm"], x, spec.norm_eps)

    def abstract_hidden(self, params: Params, num_tokens: int) -> jax.ShapeDtypeStruct:
        """What `forward` returns of T tokens, [T, E]."""
        return jax.ShapeDtypeStruct((num_tokens, self.spec.embed), params["embed_tokens"]["embedding"].dtype)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """f32[R, V] of hidden rows [R, E]."""
        with jax.named_scope("logits"):
            if self.spec.tied:
                return dot(hidden, params["embed_tokens"]["embedding"], contract=1)
            return dot(hidden, params["lm_head"]["kernel"])


def block(
    params: Params,
    kv: KVGroup,
    layer: int | jax.Array,
    x: jax.Array,
    batch: TokenBatch,
    *,
    spec: ModelSpec,
    ops: AttentionOps,
    turn: tuple[jax.Array, jax.Array],
    window: int | None,
) -> tuple[KVGroup, jax.Array]:
    """One layer over x [T, E]: `turn` is the RoPE rotation of the tokens, `window` the layer's reach in tokens."""
    a = spec.attention
    attn = params["self_attn"]
    tokens = x.shape[0]
    with jax.named_scope("attention"):
        h = rms_norm(params["input_layernorm"], x, spec.norm_eps)
        q = linear(attn["q_proj"], h).reshape(tokens, a.num_heads, a.head_dim)
        k = linear(attn["k_proj"], h).reshape(tokens, a.num_kv_heads, a.head_dim)
        v = linear(attn["v_proj"], h).reshape(tokens, a.num_kv_heads, a.head_dim)
        if a.qk_norm:
            q, k = rms_norm(attn["q_norm"], q, spec.norm_eps), rms_norm(attn["k_norm"], k, spec.norm_eps)
        q, k = rotate(q, *turn), rotate(k, *turn)
        kv = ops.write(kv, layer, k, v, batch)
        seen = ops.attend(q, kv, layer, batch, scale=a.head_dim**-0.5, window=window)
        x = x + linear(attn["o_proj"], seen.reshape(tokens, a.num_heads * a.head_dim))
    with jax.named_scope("mlp"):
        return kv, x + mlp(params["mlp"], rms_norm(params["post_attention_layernorm"], x, spec.norm_eps))
