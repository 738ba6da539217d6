from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from jdisagg.core.errors import ConfigError
from jdisagg.models.resolve import INDEX, eos_token_ids, generation_defaults, read_config, read_model_config, resolve_model


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize("name", ["/no/such/place", "./none", "a/b/c"])
def test_a_path_that_is_no_directory_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        resolve_model(name)


@pytest.mark.parametrize("name", [300 * "d", f"./{300 * 'd'}"])
def test_what_is_too_long_for_a_name_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^--model: .*d cannot be looked for: File name too long; give demo, a directory, or"
    ):
        resolve_model(name)


@pytest.mark.parametrize("read", [resolve_model, read_model_config])
def test_a_home_directory_that_is_not_there_is_refused(read: Callable[[str], object]) -> None:
    with pytest.raises(ConfigError, match="--model: got '~nobody-of-that-name/model', wanted a path without ~"):
        read("~nobody-of-that-name/model")


@contextmanager
def as_somebody_else() -> Iterator[None]:
    """Without the rights of root, whom no mode keeps out."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture
def closed() -> Iterator[Path]:
    """A model's directory that is its owner's alone, in one that everybody may look into."""
    with TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        model = root / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        (root / "linked").mkdir()
        (root / "linked" / "config.json").symlink_to(model / "config.json")
        model.chmod(0o000)
        yield model
        model.chmod(0o700)


MAY_NOT = "may not be read: Permission denied; let user [0-9]+ read it"


@pytest.mark.parametrize("name", ["", "config.json", "../linked"])
@pytest.mark.parametrize("read", [resolve_model, read_model_config])
def test_a_model_that_is_somebody_elses_is_one_line_that_says_whom_to_let_in(
    closed: Path, read: Callable[[str], object], name: str
) -> None:
    with as_somebody_else(), pytest.raises(ConfigError, match=f"--model: .* {MAY_NOT}"):
        read(str(closed / name if name != "../linked" else closed.parent / "linked"))


@pytest.mark.parametrize("target", ["nowhere", "itself", "config.json/below"])
def test_a_link_that_leads_nowhere_is_no_trouble(tmp_path: Path, target: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "itself").symlink_to(target)
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_cache_that_is_somebody_elses_is_not_an_empty_one(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(closed))
    with as_somebody_else(), pytest.raises(ConfigError, match=f"the Hub cache .*{MAY_NOT}.* HF_HOME"):
        resolve_model("someone/tiny")


def test_a_hub_id_needs_no_working_directory(closed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(closed.parent))
    snapshot = cached(closed.parent, "someone", "tiny")
    (snapshot / "tokenizer.json").write_text("{}")
    (snapshot / "model.safetensors").touch()
    assert resolve_model("someone/tiny") == snapshot  # imports what it needs: somebody else may not
    closed.chmod(0o700)
    monkeypatch.chdir(closed)
    closed.chmod(0o000)
    with as_somebody_else():
        assert resolve_model("someone/tiny") == snapshot


def cached(root: Path, owner: str, name: str) -> Path:
    """A repository in the layout of the Hub's local cache."""
    repository = root / f"models--{owner}--{name}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_a_hub_id_is_looked_up_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = cached(tmp_path, "someone", "tiny")
    assert resolve_model("someone/tiny") == snapshot
    with pytest.raises(ConfigError, match=r"someone/other is no directory, not in the local Hub cache"):
        resolve_model("someone/other")
    with pytest.raises(ConfigError, match="could not be fetched"):
        resolve_model("not a name!")


@pytest.mark.parametrize(
    ("there", "is_whole"),
    [
        (("config.json",), False),
        (("config.json", "tokenizer.json"), False),
        (("config.json", "model.safetensors"), False),
        (("config.json", "tokenizer.json", "model.safetensors"), True),
        (("config.json", "tokenizer.json", INDEX, "a.safetensors"), False),
        (("config.json", "tokenizer.json", INDEX, "a.safetensors", "b.safetensors"), True),
    ],
)
def test_what_the_cache_lacks_of_a_model_is_fetched(
    there: tuple[str, ...], is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in there:
        (tmp_path / name).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    asked: list[bool] = []

    def download(name: str, *, local_files_only: bool = False, **_: object) -> str:
        asked.append(local_files_only)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("someone/tiny") == tmp_path
    assert asked == ([True] if is_whole else [True, False])


def test_weights_that_are_there_in_another_form_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tens of gigabytes that nothing reads."""
    files = ["config.json", "model-00001.safetensors", "consolidated.safetensors", "original/params.json", "tokenizer.json"]
    fetched: list[str] = []

    def download(name: str, **options: Any) -> str:
        patterns = {key: value for key, value in options.items() if key.endswith("_patterns")}
        fetched[:] = huggingface_hub.utils.filter_repo_objects(files, **patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_model("someone/tiny")
    assert fetched == ["config.json", "model-00001.safetensors", "tokenizer.json"]


def test_weights_are_fetched_for_those_only_who_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", INDEX]
    large = ["a.safetensors", "orbax/manifest.ocdbt", "orbax/tree.json"]
    fetched: list[str] = []

    def download(name: str, **options: Any) -> str:
        patterns = {key: value for key, value in options.items() if key.endswith("_patterns")}
        fetched[:] = huggingface_hub.utils.filter_repo_objects([*small, *large], **patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_model("someone/tiny", weights=False)
    assert fetched == small
    resolve_model("someone/tiny")
    assert fetched == small + large


def test_who_reads_no_weights_asks_the_hub_for_nothing_when_the_rest_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def download(name: str, *, local_files_only: bool = False, **_: object) -> str:
        asked.append(local_files_only)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert resolve_model("someone/tiny", weights=False) == tmp_path
    assert asked == [True]


def test_the_configuration_alone_is_read_from_a_file_a_directory_or_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = cached(tmp_path, "someone", "tiny")
    (snapshot / "config.json").write_text('{"vocab_size": 5}')
    for name in (str(snapshot), str(snapshot / "config.json"), "someone/tiny"):
        assert read_model_config(name) == {"vocab_size": 5}
    assert read_model_config("demo")["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises(
        ConfigError, match=r"config\.json of someone/other .* could not be fetched .* give the path of a config"
    ):
        read_model_config("someone/other")
    for name in (str(tmp_path / "none.json"), "none.json", "models/none.json", "./none"):
        with pytest.raises(
            ConfigError, match=f"^--model: {name} is neither a file nor a directory; give demo, the path of a config.json"
        ):
            read_model_config(name)


def test_config_must_be_a_json_object(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds list, wanted a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not readable as JSON"):
        read_config(tmp_path)


def test_generation_config_wins_over_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert (eos_token_ids(tmp_path), generation_defaults(tmp_path)) == ((2,), {})
    generation = {"eos_token_id": [7, 2], "top_p": 0.9, "temperature": None, "bos_token_id": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert (eos_token_ids(tmp_path), generation_defaults(tmp_path)) == ((7, 2), {"top_p": 0.9})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": -1}))
    assert eos_token_ids(tmp_path) == (), "never"


@pytest.mark.parametrize("value", ["</s>", ["2"], [[2]], {"id": 2}, 2.5, True, 2**31])
def test_an_end_of_text_that_is_no_token_id_is_refused(value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=r"config\.json: eos_token_id is .*, wanted a token id"):
        eos_token_ids(tmp_path)


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"added_tokens": [{"id": 9, "content": "<end>"}], "model": {"vocab": {"<end>": 3}}},
        {"model": {"vocab": {"a": 0, "<end>": 9}}},
        {"added_tokens": [], "model": {"vocab": [["a", 0.0]] * 9 + [["<end>", -1.5]]}},
    ],
)
@pytest.mark.parametrize("named", ["<end>", {"content": "<end>"}])
def test_the_end_of_its_tokenizer_ends_a_model_too(tmp_path: Path, tokenizer: object, named: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert eos_token_ids(tmp_path) == ()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    assert eos_token_ids(tmp_path) == ()
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert eos_token_ids(tmp_path) == (9,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert eos_token_ids(tmp_path) == (2, 9), "a fine-tune's tokenizer names another than the base model's config"
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert eos_token_ids(tmp_path) == (9, 2)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<other>"}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert eos_token_ids(tmp_path) == (2,)


def test_json_that_is_nested_too_deep_is_not_readable(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 5000 + "1" + "}" * 5000)
    with pytest.raises(ConfigError, match=r"config\.json: not readable as JSON: maximum recursion depth exceeded"):
        read_config(tmp_path)
