from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jdisagg.core.errors import ConfigError
from jdisagg.models.resolve import INDEX, has_weights
from jdisagg.models.safetensors_files import has_safetensors, tensor_files

ONE, TWO = {"x": np.zeros(2, np.float32)}, {"y": np.ones(2, np.float32)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two files, and the index of their tensors."""
    save_file(ONE, tmp_path / "a.safetensors")
    save_file(TWO, tmp_path / "b.safetensors")
    write_index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    return tmp_path


def write_index(directory: Path, weight_map: dict[str, Any]) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("file", ["../a.safetensors", "sub/a.safetensors", "/etc/a.safetensors", "", "..", 3, None])
def test_an_index_that_names_anything_but_a_file_beside_it_is_refused(directory: Path, file: Any) -> None:
    write_index(directory, {"x": file, "y": "b.safetensors"})
    with pytest.raises(ConfigError, match=r"index\.json: weight_map names .*, wanted the name of a file beside it"):
        tensor_files(directory)


def test_a_tensor_in_two_files_of_an_index_is_refused(directory: Path) -> None:
    """The index names one of them; transformers and vLLM take the other."""
    assert tensor_files(directory) == {"x": directory / "a.safetensors", "y": directory / "b.safetensors"}
    save_file({**TWO, "x": np.ones(2, np.float32)}, directory / "b.safetensors")
    with pytest.raises(ConfigError, match=r"b\.safetensors: tensor x is in a\.safetensors too; keep one"):
        tensor_files(directory)


@pytest.mark.parametrize(
    "name",
    ["qweight", "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_packed", "weight.absmax", "SCB"],
)
def test_quantized_weights_are_called_so(tmp_path: Path, name: str) -> None:
    save_file({**ONE, f"model.layers.0.mlp.up_proj.{name}": np.zeros(2, np.int32)}, tmp_path / "model.safetensors")
    told = rf"model\.safetensors: model\.layers\.0\.mlp\.up_proj\.{name} is part of a quantized weight, wanted unquantized"
    with pytest.raises(ConfigError, match=told):
        tensor_files(tmp_path)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "consolidated.safetensors", "consolidated-00001.safetensors"])
def test_adapters_and_copies_in_another_form_are_no_weights(directory: Path, name: str) -> None:
    (directory / INDEX).unlink()
    save_file({"z": np.zeros(2, np.float32)}, directory / name)
    assert tensor_files(directory).keys() == {"x", "y"}
    assert has_weights(directory)
    for file in "ab":
        (directory / f"{file}.safetensors").unlink()
    assert not has_safetensors(directory)
    assert not has_weights(directory), "the Hub is asked for the rest"


def test_a_file_that_git_left_out_is_called_so(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(ConfigError, match=r"model\.safetensors: .* git lfs pull"):
        tensor_files(tmp_path)
