"""What a decoder-only model is, read from a Hugging Face config.json. Families differ by these fields, not by files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jdisagg.core.errors import ConfigError
from jdisagg.kv.spec import KVSpec
from jdisagg.models.rope import LONGEST, RopeSpec, positive_number


@dataclass(frozen=True, kw_only=True)
class _Family:
    """How an architecture differs from the others."""

    model_types: tuple[str, ...]  # by which transformers chooses the model
    qkv_bias: bool | None  # of q, k and v; None: `attention_bias` in config.json decides
    qk_norm: bool = False  # q and k are normalised per head
    left_out: Mapping[str, int] = field(default_factory=dict)  # what config.json means without a key; a null means none


_FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(model_types=("llama",), qkv_bias=None),
    "MistralForCausalLM": _Family(
        model_types=("mistral", "ministral"),  # what transformers calls a Mistral with layer_types
        qkv_bias=False,
        left_out={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": _Family(
        model_types=("qwen2",), qkv_bias=True, left_out={"num_key_value_heads": 32, "sliding_window": 4096}
    ),
    "Qwen3ForCausalLM": _Family(
        model_types=("qwen3",), qkv_bias=None, qk_norm=True, left_out={"num_key_value_heads": 32, "sliding_window": 4096}
    ),
}


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Shape of one attention layer; equal in all layers except for `windows`."""

    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # per layer: key j is seen by query i when i - j < window; None = every earlier key


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer with RMSNorm, RoPE, grouped-query attention and a gated MLP."""

    architecture: str
    vocab_size: int  # V
    embed: int  # E
    mlp: int  # F
    num_layers: int  # L
    attention: AttentionSpec
    rope: RopeSpec
    norm_eps: float
    mlp_bias: bool
    tied: bool  # the embedding is also the output matrix
    max_model_len: int  # tokens

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a config.json dict. Raises ConfigError naming the key that is missing or not supported."""
        architecture = _architecture(config)
        config = {**_FAMILIES[architecture].left_out, **config}
        for key in ("quantization_config", "compression_config"):  # the other one is that of older compressed-tensors
            if config.get(key) is not None:
                raise _unsupported(key, config[key], "unquantized weights")
        if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise _unsupported("hidden_act", activation, "silu")
        if config.get("is_causal") not in (None, True):
            raise _unsupported("is_causal", config["is_causal"], "true: a token that sees later ones cannot be generated")
        if config.get("per_layer_config"):
            raise _unsupported(
                "per_layer_config", config["per_layer_config"], "none of it: all layers are alike but for windows"
            )
        attention = _attention(config, architecture)
        rope = RopeSpec.from_config(config, attention.head_dim)
        return cls(
            architecture=architecture,
            vocab_size=_positive(config, "vocab_size"),
            embed=_positive(config, "hidden_size"),
            mlp=_positive(config, "intermediate_size"),
            num_layers=_positive(config, "num_hidden_layers"),
            attention=attention,
            rope=rope,
            norm_eps=positive_number(config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
            mlp_bias=architecture == "LlamaForCausalLM" and _flag(config, "mlp_bias"),
            tied=_flag(config, "tie_word_embeddings"),
            max_model_len=_max_model_len(config, rope),
        )

    @property
    def uniform_window(self) -> bool:
        """True when every layer sees the same range of keys."""
        return len(set(self.attention.windows)) == 1

    def kv_spec(self, dtype: str) -> KVSpec:
        """The KV cache group of this model, kept as `dtype`. Full and window layers mixed are one full group."""
        window = self.attention.windows[0] if self.uniform_window else None
        return KVSpec(
            num_layers=self.num_layers,
            num_kv_heads=self.attention.num_kv_heads,
            features=2 * self.attention.head_dim,
            dtype=dtype,
            kind="full" if window is None else "window",
            window=window,
        )


def _max_model_len(config: Mapping[str, Any], rope: RopeSpec) -> int:
    """Tokens that its attention was trained on. Dual chunk attention, which goes beyond them, is not served."""
    longest = rope.longest(min(_positive(config, "max_position_embeddings"), LONGEST))
    if (chunked := config.get("dual_chunk_attention_config")) is None:
        return longest
    if not isinstance(chunked, Mapping):
        raise _unsupported("dual_chunk_attention_config", chunked, "an object")
    return min(longest, _positive(chunked, "original_max_position_embeddings"))


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in _FAMILIES:
            break
    else:
        raise _unsupported("architectures", names, " | ".join(_FAMILIES))
    if (model_type := config.get("model_type")) is not None and model_type not in _FAMILIES[name].model_types:
        raise _unsupported("model_type", model_type, f"{' | '.join(_FAMILIES[name].model_types)}, as architectures says {name}")
    return name


def _attention(config: Mapping[str, Any], architecture: str) -> AttentionSpec:
    family = _FAMILIES[architecture]
    config_bias = _flag(config, "attention_bias")
    num_heads = _positive(config, "num_attention_heads")
    num_kv_heads = _positive(config, "num_key_value_heads") if config.get("num_key_value_heads") else num_heads
    if num_heads % num_kv_heads:
        raise _unsupported("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads = {num_heads}")
    if config.get("head_dim"):
        head_dim = _positive(config, "head_dim")
    else:
        head_dim = 128 if architecture == "Qwen3ForCausalLM" else _positive(config, "hidden_size") // num_heads
    if head_dim % 2:
        raise _unsupported("head_dim", head_dim, "an even number: RoPE turns pairs")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv_bias=config_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=config_bias if family.qkv_bias is None else False,
        qk_norm=family.qk_norm,
        windows=_windows(config, architecture),
    )


def _windows(config: Mapping[str, Any], architecture: str) -> tuple[int | None, ...]:
    num_layers = _positive(config, "num_hidden_layers")
    window = config.get("sliding_window")
    if architecture == "LlamaForCausalLM" or (architecture.startswith("Qwen") and not _flag(config, "use_sliding_window")):
        window = None
    if window is None:
        return (None,) * num_layers
    window, types = _positive(config, "sliding_window"), config.get("layer_types")
    if architecture == "MistralForCausalLM" and types is None:  # with them it is a Ministral, which transformers tells so, too
        return (window,) * num_layers
    if types is None:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise _unsupported("max_window_layers", first, "an integer")
        types = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in known for kind in types):
        raise _unsupported("layer_types", types, f"{num_layers} times full_attention | sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _unsupported(key, value, "a positive integer")
    return value


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value not in (None, False, True):
        raise _unsupported(key, value, "true or false")
    return bool(value)


def _unsupported(key: str, got: object, wanted: str) -> ConfigError:
    return ConfigError(f"config.json: {key} is {got!r}, wanted {wanted}")
