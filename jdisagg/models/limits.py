"""What a model can be served as: checks of flags against its config.json. No jax here, so that they come first."""

from __future__ import annotations

from jdisagg.core.config import LayerLoop, ModelConfig
from jdisagg.core.errors import ConfigError
from jdisagg.models.spec import ModelSpec


def check_model(config: ModelConfig, spec: ModelSpec, tp: int) -> None:
    """Raise ConfigError naming the flag that this model cannot be served with on `tp` devices."""
    check_tensor_parallel(spec, tp)
    if config.max_model_len is not None and config.max_model_len > spec.max_model_len:
        raise ConfigError(f"--max-model-len is {config.max_model_len}, wanted at most {spec.max_model_len}, the model's own")
    if config.layer_loop is LayerLoop.SCAN and not spec.uniform_window:
        raise ConfigError("--layer-loop is scan, wanted unrolled: windows differ between layers")


def check_tensor_parallel(spec: ModelSpec, tp: int) -> None:
    """Raise ConfigError when this model cannot be cut over `tp` devices."""
    heads, kv_heads = spec.attention.num_heads, spec.attention.num_kv_heads
    if heads % tp:
        wanted = f"a divisor of num_attention_heads = {heads}"
    elif kv_heads % tp and tp % kv_heads:
        wanted = f"a divisor or a multiple of num_key_value_heads = {kv_heads}"
    elif spec.mlp % tp:
        wanted = f"a divisor of intermediate_size = {spec.mlp}"
    else:
        return
    raise ConfigError(f"--tensor-parallel-size is {tp}, wanted {wanted}")
