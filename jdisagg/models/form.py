"""In what form a model is held: dtypes and layer loop, from configuration and platform. No jax here."""

from __future__ import annotations

from jdisagg.core.config import LayerLoop, ModelConfig

DTYPES = ("float32", "bfloat16", "float16")


def choose_dtypes(config: ModelConfig, platform: str) -> tuple[str, str]:
    """(dtype of parameters and activations, dtype of the KV cache)."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    return dtype, dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def choose_layer_loop(config: ModelConfig) -> LayerLoop:
    """UNROLLED or SCAN."""
    return LayerLoop.SCAN if config.layer_loop is LayerLoop.SCAN else LayerLoop.UNROLLED
