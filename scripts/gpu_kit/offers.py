"""The implementations of attention, write, gather and scatter that pallas_kernels has for a platform, by one signature."""

from __future__ import annotations

from typing import Any, get_args

import jax
import jax.numpy as jnp

import pallas_kernels.attention
import pallas_kernels.write
from gpu_kit.findings import Skipped
from gpu_kit.paged_rows import LAYER, PagedRows
from jdisagg.core.platforms import GPU_PLATFORMS
from pallas_kernels.implementation import Implementation, Refused

# Implementations that a platform cannot run
ELSEWHERE = {"cpu": {"tpu", "gpu"}, "tpu": {"gpu"}} | {gpu: {"tpu"} for gpu in GPU_PLATFORMS}


def implementations(platform: str) -> list[Implementation]:
    """Names, `ref` first."""
    return [name for name in get_args(Implementation) if name not in ELSEWHERE.get(platform, ())]


def attend(implementation: Implementation, paged: PagedRows, *, scale: float, window: int | None) -> jax.Array:
    """f32[T, H, D]. Raises Skipped when the implementation refuses the case, and says why."""
    options: dict[str, Any] = {"scale": scale, "window": window, "heads_major": paged.heads_major}
    options |= {"dtype": paged.q.dtype, "scales": paged.scales, "implementation": implementation}
    tables, rows = jax.tree.map(jnp.asarray, (paged.tables, paged.rows))
    run = jax.jit(lambda q, kv: pallas_kernels.attention.attend(q, kv, LAYER, tables, rows, **options))
    return unless_refused(run, jnp.asarray(paged.q), paged.kv).astype(jnp.float32)


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
