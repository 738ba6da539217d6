from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.models.spec import ModelSpec


def test_head_dim_is_derived_unless_given(config: dict[str, Any]) -> None:
    assert ModelSpec.from_config(config).attention.head_dim == 4
    assert ModelSpec.from_config({**config, "head_dim": 10}).attention.head_dim == 10
    qwen3 = {**config, "architectures": ["Qwen3ForCausalLM"]}
    assert ModelSpec.from_config(qwen3).attention.head_dim == 128, "Qwen3's own default"


@pytest.mark.parametrize(
    ("architecture", "extra", "biases", "qk_norm"),
    [
        ("LlamaForCausalLM", {"attention_bias": False}, (False, False), False),
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True), False),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False), False),
        ("Qwen2ForCausalLM", {}, (True, False), False),
        ("Qwen3ForCausalLM", {"attention_bias": False}, (False, False), True),
    ],
)
def test_families_differ_in_biases_and_norms(
    config: dict[str, Any], architecture: str, extra: dict[str, Any], biases: tuple[bool, bool], qk_norm: bool
) -> None:
    attention = ModelSpec.from_config({**config, "architectures": [architecture], **extra}).attention
    assert ((attention.qkv_bias, attention.out_bias), attention.qk_norm) == (biases, qk_norm)


@pytest.mark.parametrize(
    ("architecture", "extra", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None, None)),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None)),
        ("MistralForCausalLM", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, (None, 8)),
        ("MistralForCausalLM", {"sliding_window": 8, "layer_types": None}, (8, 8)),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, (None, None)),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            (8, None),
        ),
    ],
)
def test_windows_follow_the_family(config: dict[str, Any], architecture: str, extra: dict[str, Any], windows: object) -> None:
    assert ModelSpec.from_config({**config, "architectures": [architecture], **extra}).attention.windows == windows


def test_keys_left_out_mean_what_they_mean_to_transformers(config: dict[str, Any]) -> None:
    def attention(family: str, **keys: Any) -> tuple[int, tuple[int | None, ...]]:
        given = {**config, "architectures": [f"{family}ForCausalLM"], "num_attention_heads": 64, "head_dim": 4, **keys}
        found = ModelSpec.from_config(given).attention
        return found.num_kv_heads, found.windows

    del config["num_key_value_heads"]
    assert attention("Llama") == (64, (None, None))
    assert attention("Mistral") == (8, (4096, 4096))
    assert attention("Mistral", num_key_value_heads=None, sliding_window=None) == (64, (None, None))
    assert attention("Qwen2") == (32, (None, None))
    assert attention("Qwen3", use_sliding_window=True, max_window_layers=1) == (32, (None, 4096))


def test_kv_spec_is_a_window_group_only_when_every_layer_has_it(config: dict[str, Any]) -> None:
    mistral = ModelSpec.from_config({**config, "architectures": ["MistralForCausalLM"], "sliding_window": 8}).kv_spec(
        "bfloat16"
    )
    assert (mistral.kind, mistral.window, mistral.features, mistral.num_kv_heads, mistral.dtype) == (
        "window",
        8,
        8,
        2,
        "bfloat16",
    )
    mixed = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, "architectures": ["Qwen2ForCausalLM"]}
    qwen2 = ModelSpec.from_config({**config, **mixed}).kv_spec("float32")
    assert (qwen2.kind, qwen2.window, qwen2.num_layers) == ("full", None, 2)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compression_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 1}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1.0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e308}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 0.5}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e-308}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attn_factor": -1}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "extrapolation_factor": 0.5}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e308}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e300}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e-300}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope_parameters"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 5}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"architectures": True}, "architectures"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rope_theta": "1e6"}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "rope_scaling"),
        ({"is_causal": False}, "is_causal"),
        ({"per_layer_config": {"1": {"rms_norm_eps": 1.0}}}, "per_layer_config"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8, "layer_types": [[], {}]}, "layer_types"),
        ({"model_type": "granite"}, "model_type"),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen3"}, "model_type"),
        ({"attention_bias": "false"}, "attention_bias"),
        ({"mlp_bias": "no"}, "mlp_bias"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": "false"}, "use_sliding_window"),
    ],
)
def test_what_cannot_be_served_is_refused_by_key(config: dict[str, Any], change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config\.json: {key}\b"):
        ModelSpec.from_config({**config, **change})


@pytest.mark.parametrize("none", [None, {}])
def test_no_layer_of_its_own_is_no_error(config: dict[str, Any], none: dict[str, Any] | None) -> None:
    assert ModelSpec.from_config({**config, "per_layer_config": none}) == ModelSpec.from_config(config)


def test_a_linear_rope_stretches_the_context(config: dict[str, Any]) -> None:
    linear = {**config, "rope_scaling": {"type": "linear", "factor": 2.5}}
    assert ModelSpec.from_config(linear).max_model_len == 160, "64 positions, each turn 2.5 times as slow"
    values = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    llama3 = {**config, "rope_scaling": {"rope_type": "llama3", **values}}
    assert ModelSpec.from_config(llama3).max_model_len == 64, "config.json counts it already"


def test_what_only_dual_chunk_attention_reaches_is_not_served(config: dict[str, Any]) -> None:
    """Qwen2.5-7B-Instruct-1M."""
    chunked = {"chunk_size": 32, "local_size": 8, "original_max_position_embeddings": 32}
    assert ModelSpec.from_config({**config, "dual_chunk_attention_config": chunked}).max_model_len == 32
    for wrong in ({"chunk_size": 32}, 32):
        with pytest.raises(ConfigError, match=r"original_max_position_embeddings|dual_chunk_attention_config"):
            ModelSpec.from_config({**config, "dual_chunk_attention_config": wrong})


def test_absurdly_many_positions_are_no_error(config: dict[str, Any]) -> None:
    linear = {"rope_scaling": {"type": "linear", "factor": 4.0}, "max_position_embeddings": 10**400}
    assert ModelSpec.from_config({**config, **linear}).max_model_len == 2**42


def test_yarn_stretches_the_context_it_was_made_for(config: dict[str, Any]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    for values in (yarn, {**yarn, "original_max_position_embeddings": None}):
        spec = ModelSpec.from_config({**config, "rope_scaling": values})
        assert spec.max_model_len == 4 * (values["original_max_position_embeddings"] or 64)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("original_max_position_embedding", "original_max_position_embeddings"),
        ("beta-fast", "beta_fast"),
        ("atention_factor", "attention_factor"),
    ],
)
def test_a_misspelt_key_of_a_rope_is_refused(config: dict[str, Any], wrong: str, right: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, wrong: 32}
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ConfigError, match=rf"{key}\.{wrong} is no key that is read; did you mean {right}\?"):
            ModelSpec.from_config({**config, key: yarn})


@pytest.mark.parametrize(("wrong", "right"), [("rope_scalings", "rope_scaling"), ("rope-parameters", "rope_parameters")])
def test_a_rope_under_a_misspelt_key_is_refused(config: dict[str, Any], wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=rf"{wrong} is no key that is read; did you mean {right}\?"):
        ModelSpec.from_config({**config, wrong: {"rope_type": "yarn", "factor": 4.0}})


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({}, None),
        ({"rope_type": "linear", "factor": 2.5}, "linear, factor 2.5"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, "yarn, factor 4, made for 32 tokens"),
    ],
)
def test_how_positions_are_scaled_can_be_told(config: dict[str, Any], rope: dict[str, Any], told: str | None) -> None:
    assert ModelSpec.from_config({**config, "rope_scaling": rope}).rope.scaling == told


def test_attn_factor_times_what_follows_from_the_factor_is_how_sharp_attention_is(config: dict[str, Any]) -> None:
    """DeepSeek-R1-0528-Qwen3-8B switches the sharpening off so; transformers does not look at it, vLLM does."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8782488562869419, "extrapolation_factor": 1.0}
    assert ModelSpec.from_config({**config, "rope_scaling": yarn}).rope.attention_factor == pytest.approx(1.0)
    both = {**yarn, "attention_factor": 1.25}
    assert ModelSpec.from_config({**config, "rope_scaling": both}).rope.attention_factor == 1.25


def test_keys_of_other_ropes_are_no_errors(config: dict[str, Any]) -> None:
    others = dict.fromkeys(("attn_factor", "extrapolation_factor", "finetuned", "long_factor", "long_mscale", "mrope_section"))
    yarn = {"rope_type": "yarn", "factor": 4.0}
    given, plain = ({**config, "rope_scaling": values} for values in (yarn | others, yarn))
    assert ModelSpec.from_config(given).rope == ModelSpec.from_config(plain).rope


def test_a_rope_that_was_added_to_another_one_is_refused(config: dict[str, Any]) -> None:
    new = {"rope_type": "default", "rope_theta": 5e5}
    for kind in ("linear", "yarn"):
        with pytest.raises(ConfigError, match=rf"rope_scaling\.rope_type is '{kind}' but .* is 'default'"):
            ModelSpec.from_config({**config, "rope_parameters": new, "rope_scaling": {"type": kind, "factor": 4.0}})
    old = {"type": "linear", "factor": 4.0}
    both = {**config, "rope_parameters": {**old, "rope_theta": 5e5}, "rope_scaling": old}
    assert ModelSpec.from_config(both).rope == ModelSpec.from_config({**config, "rope_theta": 5e5, "rope_scaling": old}).rope


def test_a_rope_per_kind_of_layer_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"rope_parameters\.full_attention"):
        ModelSpec.from_config({**config, "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}})


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("LlamaForCausalLM", "llama"), ("MistralForCausalLM", "ministral"), ("Qwen3ForCausalLM", None)],
)
def test_a_model_type_of_the_architecture_changes_nothing(config: dict[str, Any], architecture: str, model_type: Any) -> None:
    config["architectures"] = [architecture]
    assert ModelSpec.from_config({**config, "model_type": model_type}) == ModelSpec.from_config(config)


def test_a_partial_rotary_factor_that_is_null_is_none(config: dict[str, Any]) -> None:
    assert ModelSpec.from_config({**config, "partial_rotary_factor": None}) == ModelSpec.from_config(config)


def test_old_and_new_rope_forms_are_equal(config: dict[str, Any]) -> None:
    values = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    old = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **values}}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **values}}
    assert ModelSpec.from_config({**config, **old}).rope == ModelSpec.from_config({**config, **new}).rope


def test_the_length_that_llama3_stretches_may_stand_beside_the_rope(config: dict[str, Any]) -> None:
    """transformers takes that one first."""
    values = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    inside = {**config, "rope_parameters": {**values, "original_max_position_embeddings": 32}}
    wanted = ModelSpec.from_config(inside).rope
    beside = {**config, "rope_parameters": values, "original_max_position_embeddings": 32}
    assert ModelSpec.from_config(beside).rope == wanted
    both = {**inside, "rope_parameters": {**values, "original_max_position_embeddings": 8}}
    assert ModelSpec.from_config({**both, "original_max_position_embeddings": 32}).rope == wanted


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones(config: dict[str, Any]) -> None:
    values = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    plain = ModelSpec.from_config({**config, "head_dim": 16}).rope.inverse_frequencies()
    scaled = {**config, "head_dim": 16, "rope_scaling": {"rope_type": "llama3", **values}}
    ratio = ModelSpec.from_config(scaled).rope.inverse_frequencies() / plain
    np.testing.assert_allclose(ratio[0], 1.0)
    np.testing.assert_allclose(ratio[2:], 1 / 8, rtol=1e-6)
    assert 1 / 8 < ratio[1] < 1
