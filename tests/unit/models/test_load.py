"""Weights on devices: what safetensors and Orbax hold arrives whole, transposed and split, and bad flags are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jdisagg.core.config import LayerLoop
from jdisagg.core.errors import ConfigError, NoMemory
from jdisagg.models.host_parts import HostParts
from jdisagg.models.sharding import make_mesh
from jdisagg.models.spec import ModelSpec
from tests.unit.models.conftest import CONFIG, tensors_of, write_model
from tests.unit.models.loading import as_orbax, equal, load


def test_kernels_are_the_transposed_tensors(model_directory: Path, tensors: dict[str, np.ndarray]) -> None:
    model = load(model_directory)
    layer = model.params["layers"][1]
    np.testing.assert_array_equal(layer["self_attn"]["k_proj"]["kernel"], tensors["model.layers.1.self_attn.k_proj.weight"].T)
    np.testing.assert_array_equal(layer["self_attn"]["o_proj"]["bias"], tensors["model.layers.1.self_attn.o_proj.bias"])
    np.testing.assert_array_equal(model.params["embed_tokens"]["embedding"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(model.params["lm_head"]["kernel"], tensors["lm_head.weight"].T)
    assert (model.dtype, model.kv_dtype, model.eos_token_ids) == ("float32", "float32", (3,))


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
@pytest.mark.parametrize("tp", [2, 4])
def test_every_device_holds_its_part_only(model_directory: Path, tmp_path: Path, kind: str, tp: int) -> None:
    whole = load(model_directory)
    cut = load(as_orbax(model_directory, tmp_path / "orbax-model") if kind == "orbax" else model_directory, tp=tp)
    attention = cut.params["layers"][0]["self_attn"]
    assert attention["q_proj"]["kernel"].addressable_shards[0].data.shape == (16, 16 // tp)
    assert attention["o_proj"]["kernel"].addressable_shards[0].data.shape == (16 // tp, 16)
    assert attention["k_proj"]["kernel"].addressable_shards[0].data.shape == (16, 4 if tp == 2 else 8)  # replicated at tp > K
    assert cut.params["embed_tokens"]["embedding"].addressable_shards[0].data.shape == (32 // tp, 16)
    assert equal(whole, cut)
    assert cut.fingerprint == whole.fingerprint


def test_weights_for_which_no_memory_is_left_are_refused_with_what_to_change(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.")

    monkeypatch.setattr("jdisagg.models.load.load_safetensors", refuse)
    wanted = r"^--model: the weights of .* in float32 are more than is free on 1 device.*--tensor-parallel-size.* 5 bytes"
    with pytest.raises(NoMemory, match=wanted):
        load(model_directory)


@pytest.mark.parametrize(("load_format", "fetches"), [("auto", True), ("dummy", False)])
def test_loading_fetches_the_weights_of_a_hub_id_where_it_reads_them(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, load_format: str, fetches: bool
) -> None:
    wanted: list[str] = []

    def download(name: str, *, allow_patterns: list[str], **_: object) -> str:
        wanted[:] = allow_patterns
        return str(model_directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load(Path("someone/tiny"), load_format=load_format)
    assert ("*.safetensors" in wanted) is fetches


def test_an_index_and_several_files_load_alike(model_directory: Path, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    names = sorted(tensors)
    directory = tmp_path / "indexed"
    directory.mkdir()
    shutil.copyfile(model_directory / "config.json", directory / "config.json")
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    without_index = load(directory)
    weight_map = {name: file for file, part in files.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "consolidated.safetensors").write_bytes(b"not in the index, not read")
    assert load(directory).fingerprint == without_index.fingerprint == load(model_directory).fingerprint


def test_bfloat16_files_and_conversion_round_once(tmp_path: Path, spec: ModelSpec) -> None:
    tensors = tensors_of(spec)
    halved = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    stored = load(write_model(tmp_path / "bf16", halved), dtype="bfloat16")
    rounded = load(write_model(tmp_path / "f32", tensors), dtype="bfloat16")
    assert stored.params["norm"]["scale"].dtype == "bfloat16"
    assert equal(stored, rounded)
    assert stored.fingerprint == rounded.fingerprint


def test_dummy_needs_only_a_config_and_does_not_depend_on_the_mesh(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    one, four = load(tmp_path, load_format="dummy", seed=7), load(tmp_path, load_format="dummy", seed=7, tp=4)
    other = load(tmp_path, load_format="dummy", seed=8)
    assert equal(one, four)
    assert one.fingerprint == four.fingerprint != other.fingerprint
    kernels = [np.asarray(layer["mlp"]["up_proj"]["kernel"]) for layer in one.params["layers"]]
    assert not np.array_equal(*kernels), "layers differ"


def test_scan_stacks_the_layers_and_keeps_the_fingerprint(model_directory: Path) -> None:
    plain, stacked = load(model_directory, tp=2), load(model_directory, tp=2, layer_loop=LayerLoop.SCAN)
    kernel = stacked.params["layers"]["mlp"]["up_proj"]["kernel"]
    assert kernel.shape == (2, 16, 24)
    assert kernel.addressable_shards[0].data.shape == (2, 16, 12)
    np.testing.assert_array_equal(kernel[1], plain.params["layers"][1]["mlp"]["up_proj"]["kernel"])
    assert (plain.layer_loop, stacked.layer_loop) == (LayerLoop.UNROLLED, LayerLoop.SCAN)
    assert plain.fingerprint == stacked.fingerprint


def test_scan_loads_one_layers_part_beside_the_stacks(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[jax.Array] = []
    num_alive: list[int] = []
    placed = HostParts.placed

    def watched(parts: HostParts) -> jax.Array:
        made.append(placed(parts))
        num_alive.append(sum(not array.is_deleted() for array in made))
        return made[-1]

    monkeypatch.setattr(HostParts, "placed", watched)
    load(model_directory, layer_loop=LayerLoop.SCAN)
    assert max(num_alive) <= len(("embed_tokens", "norm", "lm_head")) + 1


def test_a_tied_model_may_lack_or_hold_an_output_matrix(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    held = load(write_model(tmp_path / "held", tensors, tie_word_embeddings=True))
    del tensors["lm_head.weight"]
    lacking = load(write_model(tmp_path / "lacking", tensors, tie_word_embeddings=True))
    assert "lm_head" not in held.params
    assert held.fingerprint == lacking.fingerprint


def test_derived_buffers_of_old_checkpoints_are_ignored(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    assert load(write_model(tmp_path / "old", tensors)).params


@pytest.mark.parametrize("name", ["50%25", "llama#2", "which?", "a b", "v[1]", "[half"])
def test_an_orbax_checkpoint_may_lie_in_a_directory_of_any_name(name: str, model_directory: Path, tmp_path: Path) -> None:
    assert load(as_orbax(model_directory, tmp_path / name)).fingerprint == load(model_directory).fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 8}, "--tensor-parallel-size is 8, wanted a divisor of num_attention_heads = 4"),
        ({"load_format": "orbax"}, "holds no orbax weights"),
        ({"max_model_len": 65}, "--max-model-len is 65, wanted at most 64"),
    ],
)
def test_bad_flags_are_named(model_directory: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(model_directory, **options)


def test_too_few_devices_is_said() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 3, wanted 1 to 2"):
        make_mesh(jax.devices()[:2], 3)
