"""Frequencies and attention factors against transformers, for every kind of scaling that config.json may ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jdisagg.models.spec import ModelSpec

_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("values", "theta", "head_dim"),
    [
        ({"rope_type": "linear", "factor": 2.5}, 1e4, 64),
        ({**_LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192}, 5e5, 128),
        ({**_YARN, "original_max_position_embeddings": 32768}, 1e6, 128),  # Qwen2.5 and Qwen3
        (_YARN, 1e6, 128),  # 40,960 of the model's own positions
        ({**_YARN, "factor": 1.0, "original_max_position_embeddings": 4096}, 1e4, 64),
        ({**_YARN, "original_max_position_embeddings": 4096, "truncate": False}, 1.5e5, 64),
        (
            {**_YARN, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0},
            1e4,
            80,
        ),
        ({**_YARN, "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7}, 1e4, 64),
        ({**_YARN, "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.7}, 1e4, 64),
        ({**_YARN, "original_max_position_embeddings": 32, "beta_fast": 4, "beta_slow": 2.5}, 1e4, 16),
        ({**_YARN, "original_max_position_embeddings": 64, "beta_fast": 0, "mscale": 0, "mscale_all_dim": 1.0}, 1e4, 16),
        ({**_YARN, "original_max_position_embeddings": 8, "beta_fast": 1.3, "beta_slow": 1.2}, 1e4, 16),  # one pair, no ramp
    ],
)
def test_frequencies_equal_those_of_transformers(values: dict[str, Any], theta: float, head_dim: int, tmp_path: Path) -> None:
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 4 * head_dim, "head_dim": head_dim}
    made = transformers.Qwen3Config(**shape, max_position_embeddings=40960, rope_parameters={"rope_theta": theta, **values})
    wanted, factor = ROPE_INIT_FUNCTIONS[values["rope_type"]](made, "cpu")
    made.architectures = ["Qwen3ForCausalLM"]
    made.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    older = {**saved, "rope_parameters": None, "rope_theta": theta, "rope_scaling": values}
    for config in (saved, older):
        rope = ModelSpec.from_config(config).rope
        np.testing.assert_allclose(rope.inverse_frequencies(), wanted.numpy(), rtol=2e-6)
        assert rope.attention_factor == pytest.approx(factor)
