"""Checkpoints that are damaged, cut short or of another model are refused, and what is wrong with them is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jdisagg.core.errors import ConfigError
from jdisagg.models import safetensors_source
from tests.unit.models.conftest import CONFIG, write_model
from tests.unit.models.loading import as_orbax, load


@pytest.mark.parametrize("slab_elements", [2**20, 16], ids=["one slab", "a row each"])
def test_an_output_matrix_of_its_own_in_a_tied_model_is_refused(
    tmp_path: Path, tensors: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch, slab_elements: int
) -> None:
    """transformers 5 uses it in spite of config.json, so that leaving it out would give other tokens."""
    monkeypatch.setattr(safetensors_source, "SLAB_ELEMENTS", slab_elements)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][-1, -1] += 1
    told = r"model\.safetensors: lm_head\.weight is not .* tie_word_embeddings .* write false there, or remove the tensor"
    with pytest.raises(ConfigError, match=told):
        load(write_model(tmp_path / "held", tensors, tie_word_embeddings=True))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][1:].copy()
    with pytest.raises(ConfigError, match=told):
        load(write_model(tmp_path / "cut", tensors, tie_word_embeddings=True))


def without(tensors: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: without(t, "model.norm.weight"), r"1 tensors are missing, first model\.norm\.weight"),
        (lambda t: {**t, "model.spare.weight": np.zeros(2, np.float32)}, r"model\.safetensors: .* first model\.spare\.weight"),
        (
            lambda t: {**t, "model.layers.0.mlp.up_proj.weight": np.zeros((16, 24), np.float32)},
            r"model\.safetensors: tensor model\.layers\.0\.mlp\.up_proj\.weight is \[16, 24\], wanted \[24, 16\]",
        ),
        (lambda t: {**t, "model.norm.weight": np.zeros(16, np.int8)}, r"model\.norm\.weight is I8, wanted one of"),
    ],
)
def test_bad_tensors_are_named(tmp_path: Path, tensors: dict[str, np.ndarray], change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write_model(tmp_path / "bad", change(tensors)))


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_a_weight_beyond_float16_is_named(tmp_path: Path, tensors: dict[str, np.ndarray], kind: str) -> None:
    tensors["model.norm.weight"] = np.full(16, 7e4, np.float32)
    directory = write_model(tmp_path / "large", tensors)
    if kind == "orbax":
        directory = as_orbax(directory, tmp_path / "orbax-model")
    with pytest.raises(ConfigError, match=r"--dtype: tensor model\.norm\.weight has values beyond 65504.*; use bfloat16 or"):
        load(directory, dtype="float16")
    assert load(directory, dtype="bfloat16").params


def test_an_orbax_checkpoint_of_another_shape_is_named(model_directory: Path, tmp_path: Path) -> None:
    directory = as_orbax(model_directory, tmp_path / "orbax-model")
    (directory / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": 48}))
    with pytest.raises(ConfigError, match=r"mlp\.\w+\.weight is \[\d+, \d+\], wanted \[\d+, \d+\]"):
        load(directory)
    (directory / "config.json").write_text(json.dumps({**CONFIG, "attention_bias": False}))
    with pytest.raises(ConfigError, match=r"proj\.bias is not one of LlamaForCausalLM"):
        load(directory)
    shutil.rmtree(directory / "orbax")
    (directory / "orbax").mkdir()
    with pytest.raises(ConfigError, match="not readable as an Orbax checkpoint"):
        load(directory)


def test_a_damaged_orbax_checkpoint_is_named(model_directory: Path, tmp_path: Path) -> None:
    directory = as_orbax(model_directory, tmp_path / "orbax-model")
    for file in (directory / "orbax" / "ocdbt.process_0" / "d").iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ConfigError, match=r"orbax: tensor [\w.]+ is not readable"):
        load(directory)


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"tree_metadata": []}', '{"tree_metadata": {"a": 3}}', "{"])
def test_an_orbax_checkpoint_with_another_file_for_its_list_of_tensors_is_named(
    text: str, model_directory: Path, tmp_path: Path
) -> None:
    directory = as_orbax(model_directory, tmp_path / "orbax-model")
    (directory / "orbax" / "_METADATA").write_text(text)
    with pytest.raises(ConfigError, match=r"orbax-model/orbax: not readable as an Orbax checkpoint: .+; convert again"):
        load(directory)


def test_an_orbax_checkpoint_that_was_copied_in_part_is_named_and_nothing_else_is_said(
    model_directory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = as_orbax(model_directory, tmp_path / "orbax-model")
    shutil.rmtree(directory / "orbax" / "d")
    capfd.readouterr()
    with pytest.raises(ConfigError, match="not readable as an Orbax checkpoint: NOT_FOUND") as caught:
        load(directory)
    assert "\n" not in caught.value.message
    assert "Traceback" not in capfd.readouterr().err


def test_a_truncated_or_absent_file_is_named(model_directory: Path) -> None:
    file = model_directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors: not readable as safetensors"):
        load(model_directory)
    index = {"weight_map": {"model.norm.weight": "gone.safetensors"}}
    (model_directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"gone\.safetensors: not readable"):
        load(model_directory)


def test_weights_in_one_file_beside_others_in_an_index_are_refused(
    model_directory: Path, tensors: dict[str, np.ndarray]
) -> None:
    """transformers takes the one file, vLLM those of the index."""
    save_file(tensors, model_directory / "old.safetensors")
    index = model_directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "old.safetensors")}))
    with pytest.raises(ConfigError, match=r"model\.safetensors is there, too, and .*index\.json does not name it; remove one"):
        load(model_directory)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    assert load(model_directory).params
