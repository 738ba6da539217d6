"""The demo network for training: a Llama-style decoder as pure functions over a tree of float32 weights.

Kept apart from the serving model on purpose: no paged cache, attention that does not cross documents, gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]
QUERY_BLOCK = 64  # queries per attention block; keys beyond a block are never computed


@dataclass(frozen=True)
class Shape:
    """Sizes, named as config.json names them."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


def init_params(key: jax.Array, shape: Shape) -> Params:
    """Normal weights of standard deviation fan_in ** -0.5; output projections scaled down by depth; norms one."""
    e, f, d = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q, kv = shape.num_attention_heads * d, shape.num_key_value_heads * d
    depth = (2 * shape.num_hidden_layers) ** -0.5
    sizes = {"q": (e, q, 1.0), "k": (e, kv, 1.0), "v": (e, kv, 1.0), "o": (q, e, depth)}
    sizes |= {"gate": (e, f, 1.0), "up": (e, f, 1.0), "down": (f, e, depth)}
    layers = []
    for index in range(shape.num_hidden_layers):
        keys = jax.random.split(jax.random.fold_in(key, index), len(sizes))
        layer = {
            name: scale * rows**-0.5 * jax.random.normal(k, (rows, columns))
            for k, (name, (rows, columns, scale)) in zip(keys, sizes.items(), strict=True)
        }
        layers.append(layer | {"attn_norm": jnp.ones(e), "mlp_norm": jnp.ones(e)})
    embed = 0.02 * jax.random.normal(jax.random.fold_in(key, shape.num_hidden_layers), (shape.vocab_size, e))
    return {"embed": embed, "norm": jnp.ones(e), "layers": layers}


def _dot(x: jax.Array, w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x[T, I] @ w[I, O] with inputs rounded to `dtype` and float32 accumulation and result."""
    return jnp.dot(x.astype(dtype), w.astype(dtype), preferred_element_type=jnp.float32)


def _matmul_fwd(x: jax.Array, w: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    x, w = x.astype(dtype), w.astype(dtype)
    return _dot(x, w, dtype), (x, w)


def _matmul_bwd(dtype: jnp.dtype, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    return _dot(g, w.T, dtype), _dot(x.T, g, dtype)


matmul = jax.custom_vjp(_dot, nondiff_argnums=(2,))  # rounded so in both directions
matmul.defvjp(_matmul_fwd, _matmul_bwd)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x[T, E] over its root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale[None]


def rope(x: jax.Array, theta: float) -> jax.Array:
    """Rotate x[B, N, T, D] by position along T; halves are paired (the Llama convention)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[-2], dtype=jnp.float32)[None, None, :, None] * frequency[None, None, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    """Causal attention inside documents. q[B, H, T, D], k and v[B, K, T, D], segments i32[B, T] -> [B, H, T, D]."""
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    out = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        rows = q[:, :, start:end].reshape(batch, kv_heads, groups * (end - start), dim) * dim**-0.5
        causal = jnp.arange(end)[None, None] <= jnp.arange(start, end)[None, :, None]
        seen = causal & (segments[:, start:end, None] == segments[:, None, :end])
        mixed = attend_block(rows, k[:, :, :end], v[:, :, :end], jnp.tile(seen, (1, groups, 1))[:, None])
        out.append(mixed.reshape(batch, heads, end - start, dim))
    return jnp.concatenate(out, axis=2)


@jax.custom_vjp
def attend_block(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """softmax(q k^T) v over keys where `seen`; q[B, K, R, D], k and v[B, K, S, D], seen bool[B, 1, R, S].

    The backward pass recomputes the weights from their log-sum: a third less CPU time than differentiating the softmax.
    """
    return _attend_fwd(q, k, v, seen)[0]


def _attend_fwd(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    scores = jnp.where(seen, jnp.einsum("bkrd,bksd->bkrs", q, k), -1e30)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("bkrs,bksd->bkrd", weights, v) / total
    return out, (q, k, v, seen, out, largest + jnp.log(total))


def _attend_bwd(saved: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, seen, out, log_total = saved
    weights = jnp.where(seen, jnp.exp(jnp.einsum("bkrd,bksd->bkrs", q, k) - log_total), 0.0)
    d_scores = weights * (jnp.einsum("bkrd,bksd->bkrs", g, v) - jnp.sum(g * out, axis=-1, keepdims=True))
    d_q = jnp.einsum("bkrs,bksd->bkrd", d_scores, k)
    return d_q, jnp.einsum("bkrs,bkrd->bksd", d_scores, q), jnp.einsum("bkrs,bkrd->bksd", weights, g), None


attend_block.defvjp(_attend_fwd, _attend_bwd)


def forward(params: Params, tokens: jax.Array, segments: jax.Array, *, shape: Shape, dtype: jnp.dtype) -> jax.Array:
    """Logits f32[B, T, V] of the token after each of tokens i32[B, T]."""
    batch, length = tokens.shape
    eps, dim = shape.rms_norm_eps, shape.head_dim
    x = params["embed"][tokens].reshape(batch * length, -1)

    def heads(y: jax.Array) -> jax.Array:
        return y.reshape(batch, length, -1, dim).swapaxes(1, 2)

    for layer in params["layers"]:
        h = rms_norm(x, layer["attn_norm"], eps)
        q, k, v = (heads(matmul(h, layer[name], dtype)) for name in ("q", "k", "v"))
        mixed = attention(rope(q, shape.rope_theta), rope(k, shape.rope_theta), v, segments)
        x = x + matmul(mixed.swapaxes(1, 2).reshape(batch * length, -1), layer["o"], dtype)
        h = rms_norm(x, layer["mlp_norm"], eps)
        h = jax.nn.silu(matmul(h, layer["gate"], dtype)) * matmul(h, layer["up"], dtype)
        x = x + matmul(h, layer["down"], dtype)
    logits = matmul(rms_norm(x, params["norm"], eps), params["embed"].T, dtype)
    return logits.reshape(batch, length, -1)


def token_nats(
    params: Params, tokens: jax.Array, segments: jax.Array, *, shape: Shape, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood f32[B, T] (nats) of tokens[:, 1:] of i32[B, T + 1], and a mask of those inside their document."""
    logits = forward(params, tokens[:, :-1], segments[:, :-1], shape=shape, dtype=dtype)
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - chosen
    return nats, segments[:, 1:] == segments[:, :-1]
