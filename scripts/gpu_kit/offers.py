"""The implementations of attention, write, gather and scatter that pallas_kernels offers on a platform, by one signature.

`pallas_kernels.attention`, `write` and `transfer` choose by name; where these modules are not there yet, `ref` is called
itself and is the only implementation.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, get_args

import jax
import jax.numpy as jnp

from gpu_kit.attention_case import LAYER, Arrays
from gpu_kit.findings import Skipped
from pallas_kernels import ref

ELSEWHERE = {"cpu": {"tpu", "gpu"}, "gpu": {"tpu"}, "tpu": {"gpu"}}  # implementations that a platform cannot run


def implementations(platform: str) -> list[str]:
    """Names, `ref` first."""
    if importlib.util.find_spec("pallas_kernels.implementation") is None:
        return ["ref"]
    names = get_args(importlib.import_module("pallas_kernels.implementation").Implementation)
    return sorted((name for name in names if name not in ELSEWHERE.get(platform, set())), key=lambda name: name != "ref")


def attend(implementation: str, arrays: Arrays, *, heads_major: bool) -> jax.Array:
    """f32[T, H, D]. Raises Skipped when the implementation refuses the case, and says why."""
    case = arrays.case
    kv, scales = (None if array is None else on_device(array, heads_major=heads_major) for array in _cache(arrays))
    product = jnp.dtype("float32" if case.kv_dtype == "float32" else "bfloat16")
    options = {
        "scale": case.head_dim**-0.5,
        "window": case.window,
        "heads_major": heads_major,
        "dtype": product,
        "scales": scales,
    }
    q = jnp.asarray(arrays.q, product)
    if importlib.util.find_spec("pallas_kernels.attention") is None:
        tables, positions = arrays.page_tables[arrays.owners], arrays.positions
        run = jax.jit(lambda q, kv: ref.attend(q, kv, LAYER, jnp.asarray(tables), jnp.asarray(positions), **options))
        return run(q, kv).astype(jnp.float32)
    dispatch = importlib.import_module("pallas_kernels.attention").attend
    rows = importlib.import_module("pallas_kernels.rows").Rows(
        starts=jnp.asarray(arrays.starts),
        counts=jnp.asarray([count for count, _ in case.rows], jnp.int32),
        lengths=jnp.asarray([length for _, length in case.rows], jnp.int32),
    )
    run = jax.jit(
        lambda q, kv: dispatch(q, kv, LAYER, jnp.asarray(arrays.page_tables), rows, implementation=implementation, **options)
    )
    return _unless_refused(run, q, kv).astype(jnp.float32)


def write(
    implementation: str, kv: jax.Array, rows: jax.Array, pages: jax.Array, offsets: jax.Array, *, heads_major: bool
) -> Any:
    """`kv` with rows [T, K, F] stored; see `attend`."""
    if importlib.util.find_spec("pallas_kernels.write") is None:
        return jax.jit(lambda kv: ref.store(kv, LAYER, rows, pages, offsets, heads_major=heads_major))(kv)
    dispatch = importlib.import_module("pallas_kernels.write").write
    run = jax.jit(lambda kv: dispatch(kv, LAYER, rows, pages, offsets, heads_major=heads_major, implementation=implementation))
    return _unless_refused(run, kv)


def transfers() -> Any:
    """The module with `gather` and `scatter`, or None."""
    found = importlib.util.find_spec("pallas_kernels.transfer")
    return None if found is None else importlib.import_module("pallas_kernels.transfer")


def on_device(array: Any, *, heads_major: bool) -> jax.Array:
    """A tokens-major cache [L, P, S, K, F] in the order that the platform's engine keeps."""
    return jnp.asarray(array.swapaxes(2, 3) if heads_major else array)


def _cache(arrays: Arrays) -> tuple[Any, Any]:
    return arrays.stored, arrays.scales


def _unless_refused(run: Any, *arguments: Any) -> jax.Array:
    try:
        return run(*arguments)
    except ValueError as refusal:
        raise Skipped(str(refusal)) from refusal
