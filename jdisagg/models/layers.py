"""The pieces of a block as pure functions. Dots accumulate in float32; norms and RoPE compute in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.models.rope import RopeSpec


def dot(x: jax.Array, w: jax.Array, *, contract: int = 0) -> jax.Array:
    """x [..., I] times w along w's axis `contract`, in float32.

    The output type is what counts on CPU: bfloat16 in and out is 5 times slower than float32, bfloat16 in and float32 out
    runs on AMX. float32 weights are multiplied as float32 everywhere (GPU and TPU would silently round them otherwise).
    """
    return lax.dot_general(
        x,
        w,
        (((x.ndim - 1,), (contract,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def linear(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """x [T, I] @ kernel [I, O] (+ bias [O]) in x's dtype, accumulated in float32."""
    y = dot(x, params["kernel"])
    if "bias" in params:
        y = y + params["bias"].astype(jnp.float32)[None, :]
    return y.astype(x.dtype)


def rms_norm(params: Mapping[str, jax.Array], x: jax.Array, eps: float) -> jax.Array:
    """x [..., D] over its root mean square, times `scale` [D]; float32 inside, x's dtype outside."""
    x32 = x.astype(jnp.float32)
    normal = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    scale = params["scale"].astype(jnp.float32)
    return (normal * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


def angles(rope: RopeSpec, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, f32[T, 1, D/2], of the rotation at positions i32[T] (RoFormer, arXiv:2104.09864), times the factor that
    queries and keys have."""
    turned = positions.astype(jnp.float32)[:, None] * jnp.asarray(rope.inverse_frequencies())[None, :]
    cos, sin = jnp.cos(turned)[:, None, :], jnp.sin(turned)[:, None, :]
    return (cos, sin) if rope.attention_factor == 1.0 else (cos * rope.attention_factor, sin * rope.attention_factor)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the feature pairs of x [T, H, D], d together with d + D/2, in float32; the result has x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def mlp(params: Mapping[str, Any], x: jax.Array) -> jax.Array:
    """x [T, E] through the gated MLP."""
    gate, up = linear(params["gate_proj"], x), linear(params["up_proj"], x)
    active = (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(x.dtype)
    return linear(params["down_proj"], active)
