"""A tiny Llama in every form the loader reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jdisagg.models.declare import declarations
from jdisagg.models.spec import ModelSpec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "eos_token_id": 3,
}


def tensors_of(spec: ModelSpec) -> dict[str, np.ndarray]:
    """Random tensors as a checkpoint holds them."""
    random = np.random.default_rng(0)
    return {
        declared.name: random.standard_normal(declared.shape[::-1] if declared.transposed else declared.shape, np.float32)
        for declared in declarations(spec).values()
    }


def write_model(directory: Path, tensors: dict[str, np.ndarray], **overrides: Any) -> Path:
    """config.json and one model.safetensors."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **overrides}))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def config() -> dict[str, Any]:
    return dict(CONFIG)


@pytest.fixture
def spec() -> ModelSpec:
    return ModelSpec.from_config(CONFIG)


@pytest.fixture
def tensors(spec: ModelSpec) -> dict[str, np.ndarray]:
    return tensors_of(spec)


@pytest.fixture
def model_directory(tmp_path: Path, tensors: dict[str, np.ndarray]) -> Path:
    return write_model(tmp_path / "model", tensors)
