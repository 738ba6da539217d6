"""The implementations of attention, write, gather and scatter that pallas_kernels has for a platform, by one signature."""

from __future__ import annotations

from typing import Any, get_args

import jax
import jax.numpy as jnp

import pallas_kernels.attention
import pallas_kernels.write
from gpu_kit.attention_case import LAYER, Arrays
from gpu_kit.findings import Skipped
from jdisagg.core.platforms import GPU_PLATFORMS
from pallas_kernels.implementation import Implementation, Refused
from pallas_kernels.rows import Rows

# Implementations that a platform cannot run
ELSEWHERE = {"cpu": {"tpu", "gpu"}, "tpu": {"gpu"}} | {gpu: {"tpu"} for gpu in GPU_PLATFORMS}


def implementations(platform: str) -> list[Implementation]:
    """Names, `ref` first."""
    return [name for name in get_args(Implementation) if name not in ELSEWHERE.get(platform, ())]


def attend(implementation: Implementation, arrays: Arrays, *, heads_major: bool) -> jax.Array:
    """f32[T, H, D]. Raises Skipped when the implementation refuses the case, and says why."""
    case = arrays.case
    kv = on_device(arrays.stored, heads_major=heads_major)
    scales = None if arrays.scales is None else on_device(arrays.scales, heads_major=heads_major)
    product = jnp.dtype("float32" if case.kv_dtype == "float32" else "bfloat16")
    options: dict[str, Any] = {"scale": case.head_dim**-0.5, "window": case.window, "heads_major": heads_major}
    options |= {"dtype": product, "scales": scales, "implementation": implementation}
    tables, rows = (
        jnp.asarray(arrays.page_tables),
        Rows(
            starts=jnp.asarray(arrays.starts),
            counts=jnp.asarray([count for count, _ in case.rows], jnp.int32),
            lengths=jnp.asarray([length for _, length in case.rows], jnp.int32),
        ),
    )
    run = jax.jit(lambda q, kv: pallas_kernels.attention.attend(q, kv, LAYER, tables, rows, **options))
    return unless_refused(run, jnp.asarray(arrays.q, product), kv).astype(jnp.float32)


def write(
    implementation: Implementation,
    kv: jax.Array,
    rows: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    heads_major: bool,
) -> Any:
    """`kv` with rows [T, K, F] stored; see `attend`."""
    options: dict[str, Any] = {"heads_major": heads_major, "implementation": implementation}
    return unless_refused(jax.jit(lambda kv: pallas_kernels.write.write(kv, LAYER, rows, pages, offsets, **options)), kv)


def on_device(array: Any, *, heads_major: bool) -> jax.Array:
    """A tokens-major cache [L, P, S, K, F] in the order that the platform's engine keeps."""
    return jnp.asarray(array.swapaxes(2, 3) if heads_major else array)


def unless_refused(run: Any, *arguments: Any) -> Any:
    """What `run` gives. Raises Skipped where the implementation refuses the case."""
    try:
        return run(*arguments)
    except Refused as refusal:
        raise Skipped(str(refusal)) from refusal
