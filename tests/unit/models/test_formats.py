from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jdisagg.core.errors import ConfigError
from jdisagg.models.formats import choose_format
from jdisagg.models.resolve import read_config


def test_auto_prefers_safetensors(tmp_path: Path) -> None:
    (tmp_path / "orbax").mkdir()
    assert choose_format("auto", tmp_path) == "orbax"
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    assert choose_format("auto", tmp_path) == "safetensors"
    assert choose_format("orbax", tmp_path) == "orbax"
    assert choose_format("dummy", tmp_path) == "dummy"


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"), r"but pytorch_model-00001-of-00002\.bin"),
        (("model.Q4_K_M.gguf",), r"but model\.Q4_K_M\.gguf"),
        (("consolidated.00.pth",), r"but consolidated\.00\.pth"),
        (("consolidated.safetensors",), r"but consolidated\.safetensors"),
        ((), "holds no safetensors weights; give another --model"),
    ],
)
def test_weights_of_another_format_are_named(tmp_path: Path, files: tuple[str, ...], told: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=told) as caught:
        choose_format("auto", tmp_path)
    assert ("save_pretrained" in caught.value.message) == bool(files)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-3.1-8B"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    told = r"holds an adapter \(adapter_config\.json\), wanted a whole model; merge it into its base first"
    with pytest.raises(ConfigError, match=told):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=told):
        choose_format("auto", tmp_path)
