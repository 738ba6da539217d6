"""The fingerprint of a model: what tells two apart, in short parts that say what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jdisagg.core.config import LayerLoop, Numerics
from tests.unit.models.conftest import CONFIG, write_model
from tests.unit.models.loading import load


def test_fingerprint_tells_weights_dtype_numerics_and_spec_apart(
    model_directory: Path, tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    changed = {name: value.copy() for name, value in tensors.items()}
    row = changed["model.layers.0.mlp.up_proj.weight"][0]
    row[[0, 1]] = row[[1, 0]]  # the same numbers elsewhere
    fingerprints = [
        load(model_directory).fingerprint,
        load(model_directory, dtype="bfloat16").fingerprint,
        load(model_directory, numerics=Numerics.EXACT).fingerprint,
        load(model_directory, numerics=Numerics.EXACT, layer_loop=LayerLoop.SCAN).fingerprint,  # rounds in other places
        load(write_model(tmp_path / "eps", tensors, rms_norm_eps=1e-5)).fingerprint,
        load(write_model(tmp_path / "changed", changed)).fingerprint,
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    assert load(model_directory).fingerprint == fingerprints[0]
    assert load(model_directory, layer_loop=LayerLoop.SCAN).fingerprint == fingerprints[0]


@pytest.mark.parametrize(
    ("tensor", "config", "differing"),
    [
        (None, {"numerics": Numerics.EXACT}, ["numerics"]),
        (None, {"rms_norm_eps": 1e-5}, ["model.norm_eps"]),
        (None, {"rope_theta": 1e6, "max_position_embeddings": 128}, ["model.rope.theta", "model.max_model_len"]),
        (None, {"dtype": "bfloat16"}, ["dtype", "weights.embed", "weights.layers", "weights.head"]),
        ("model.embed_tokens.weight", {}, ["weights.embed"]),
        ("model.layers.1.mlp.up_proj.weight", {}, ["weights.layers"]),
        ("model.norm.weight", {}, ["weights.head"]),
        ("lm_head.weight", {}, ["weights.head"]),
    ],
)
def test_the_parts_of_a_fingerprint_say_what_differs(
    tensors: dict[str, np.ndarray], tmp_path: Path, tensor: str | None, config: dict[str, Any], differing: list[str]
) -> None:
    one = load(write_model(tmp_path / "one", tensors))
    if tensor is not None:
        tensors[tensor].reshape(-1)[5] += 0.5
    flags = {key: value for key, value in config.items() if key in ("numerics", "dtype")}
    keys = {key: value for key, value in config.items() if key not in flags}
    other = load(write_model(tmp_path / "other", tensors, **keys), **flags)
    assert [name for name, _ in one.fingerprint_parts] == [name for name, _ in other.fingerprint_parts]
    assert [name for name, value in one.fingerprint_parts if (name, value) not in other.fingerprint_parts] == differing
    assert one.fingerprint != other.fingerprint


def test_the_parts_of_a_fingerprint_are_named_as_the_spec_and_kept_short(model_directory: Path) -> None:
    parts = dict(load(model_directory, tp=2).fingerprint_parts)
    assert parts == dict(load(model_directory).fingerprint_parts)
    told = ("model.num_layers", "model.attention.num_heads", "model.architecture", "numerics", "dtype")
    assert [parts[name] for name in told] == ["2", "4", "LlamaForCausalLM", "fast", "float32"]
    assert all(len(parts[f"weights.{group}"]) == 16 for group in ("embed", "layers", "head"))


def test_long_values_that_begin_alike_stay_apart(tmp_path: Path) -> None:
    deep = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 12, "use_sliding_window": True, "sliding_window": 4}
    models = []
    for first in (10, 11):
        directory = tmp_path / str(first)
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**CONFIG, **deep, "max_window_layers": first}))
        models.append(load(directory, load_format="dummy"))
    one, other = (dict(model.fingerprint_parts) for model in models)
    assert [name for name in one if one[name] != other[name]] == ["model.attention.windows"]
    assert one["model.attention.windows"].startswith("(None, None, ")
    assert max(map(len, one.values())) < 64


def test_a_fingerprint_is_what_earlier_versions_made_of_the_same_model(model_directory: Path) -> None:
    # A fleet is upgraded worker by worker: old and new pair while this holds. A new field of ModelSpec ends it, knowingly.
    assert load(model_directory).fingerprint == "8cad4ff0854dfb37da2cf613fe745e5d"
