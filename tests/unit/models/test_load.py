from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jdisagg.core.config import LayerLoop, ModelConfig, Numerics
from jdisagg.core.errors import ConfigError
from jdisagg.models import safetensors_source
from jdisagg.models.load import LoadedModel, load_model
from jdisagg.models.orbax_source import save_orbax
from jdisagg.models.sharding import make_mesh
from jdisagg.models.spec import ModelSpec
from tests.unit.models.conftest import CONFIG, tensors_of, write_model


def load(directory: Path, *, tp: int = 1, seed: int = 0, **config: Any) -> LoadedModel:
    config = {"tensor_parallel_size": tp, **config}
    return load_model(ModelConfig(model=str(directory), **config), make_mesh(jax.devices(), tp), seed=seed)


def as_orbax(model: LoadedModel, directory: Path) -> Path:
    directory.mkdir()
    shutil.copyfile(model.directory / "config.json", directory / "config.json")
    save_orbax(directory, model.spec, model.params)
    return directory


def equal(a: LoadedModel, b: LoadedModel) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((np.asarray(x) == np.asarray(y)).all()), a.params, b.params)))


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
    cut = load(as_orbax(whole, tmp_path / "orbax-model") if kind == "orbax" else model_directory, tp=tp)
    attention = cut.params["layers"][0]["self_attn"]
    assert attention["q_proj"]["kernel"].addressable_shards[0].data.shape == (16, 16 // tp)
    assert attention["o_proj"]["kernel"].addressable_shards[0].data.shape == (16 // tp, 16)
    assert attention["k_proj"]["kernel"].addressable_shards[0].data.shape == (16, 4 if tp == 2 else 8)  # replicated at tp > K
    assert cut.params["embed_tokens"]["embedding"].addressable_shards[0].data.shape == (32 // tp, 16)
    assert equal(whole, cut)
    assert cut.fingerprint == whole.fingerprint


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


def test_a_tied_model_may_lack_or_hold_an_output_matrix(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    held = load(write_model(tmp_path / "held", tensors, tie_word_embeddings=True))
    del tensors["lm_head.weight"]
    lacking = load(write_model(tmp_path / "lacking", tensors, tie_word_embeddings=True))
    assert "lm_head" not in held.params
    assert held.fingerprint == lacking.fingerprint


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


def test_derived_buffers_of_old_checkpoints_are_ignored(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    assert load(write_model(tmp_path / "old", tensors)).params


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
        directory = as_orbax(load(directory), tmp_path / "orbax-model")
    with pytest.raises(ConfigError, match=r"--dtype: tensor model\.norm\.weight has values beyond 65504.*; use bfloat16 or"):
        load(directory, dtype="float16")
    assert load(directory, dtype="bfloat16").params


def test_an_orbax_checkpoint_of_another_shape_is_named(model_directory: Path, tmp_path: Path) -> None:
    directory = as_orbax(load(model_directory), tmp_path / "orbax-model")
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
    directory = as_orbax(load(model_directory), tmp_path / "orbax-model")
    for file in (directory / "orbax" / "ocdbt.process_0" / "d").iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ConfigError, match=r"orbax: tensor [\w.]+ is not readable"):
        load(directory)


@pytest.mark.parametrize("name", ["50%25", "llama#2", "which?", "a b", "v[1]", "[half"])
def test_an_orbax_checkpoint_may_lie_in_a_directory_of_any_name(name: str, model_directory: Path, tmp_path: Path) -> None:
    model = load(model_directory)
    assert load(as_orbax(model, tmp_path / name)).fingerprint == model.fingerprint


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"tree_metadata": []}', '{"tree_metadata": {"a": 3}}', "{"])
def test_an_orbax_checkpoint_with_another_file_for_its_list_of_tensors_is_named(
    text: str, model_directory: Path, tmp_path: Path
) -> None:
    directory = as_orbax(load(model_directory), tmp_path / "orbax-model")
    (directory / "orbax" / "_METADATA").write_text(text)
    with pytest.raises(ConfigError, match=r"orbax-model/orbax: not readable as an Orbax checkpoint: .+; convert again"):
        load(directory)


def test_an_orbax_checkpoint_that_was_copied_in_part_is_named_and_nothing_else_is_said(
    model_directory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = as_orbax(load(model_directory), tmp_path / "orbax-model")
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 8}, "--tensor-parallel-size is 8, wanted a divisor of num_attention_heads = 4"),
        ({"dtype": "int8"}, "--dtype is 'int8', wanted auto"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype is 'fp8', wanted auto"),
        ({"load_format": "gguf"}, "--load-format is 'gguf', wanted auto"),
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
