"""In what form a model is held: dtypes and layer loop, from configuration and platform. No jax here."""

from __future__ import annotations

from jdisagg.core.config import LayerLoop, ModelConfig
from jdisagg.core.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8")


def choose_dtypes(config: ModelConfig, platform: str) -> tuple[str, str]:
    """(dtype of parameters and activations, dtype of the KV cache). Raises ConfigError naming the flag."""
    dtype = _dtype("dtype", config.dtype, DTYPES, auto="float32" if platform == "cpu" else "bfloat16")
    return dtype, _dtype("kv_cache_dtype", config.kv_cache_dtype, KV_DTYPES, auto=dtype)


def choose_layer_loop(config: ModelConfig) -> LayerLoop:
    """UNROLLED or SCAN."""
    return LayerLoop.SCAN if config.layer_loop is LayerLoop.SCAN else LayerLoop.UNROLLED


def _dtype(key: str, value: str, known: tuple[str, ...], *, auto: str) -> str:
    if value == "auto":
        return auto
    if value not in known:
        raise ConfigError(f"--{key.replace('_', '-')} is {value!r}, wanted auto | {' | '.join(known)}", field=key)
    return value
