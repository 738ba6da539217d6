"""What a worker finds wrong before it imports jax, and what it leaves for later."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import load_config
from jdisagg.models.resolve import INDEX, resolve_model
from jdisagg.serve import router
from jdisagg.serve.preflight import check_worker


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that were fetched of someone/tiny, a model on a Hub, of which nothing is cached."""
    hub, cache, names = resolve_model("demo"), tmp_path / "cache", list[str]()
    cache.mkdir()

    def download(name: str, *, local_files_only: bool = False, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        files = [] if local_files_only else sorted(file.name for file in hub.iterdir())
        for file in huggingface_hub.utils.filter_repo_objects(
            files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            shutil.copyfile(hub / file, cache / file)
            names.append(file)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return names


def test_weights_are_not_fetched_before_a_port_is_bound(fetched: list[str]) -> None:
    check_worker(load_config(["--role", "unified", "--model", "someone/tiny"]))
    assert "tokenizer.json" in fetched
    assert not [name for name in fetched if name.endswith(".safetensors")]


def test_a_router_fetches_no_weights(fetched: list[str]) -> None:
    router._read("someone/tiny")
    assert "tokenizer.json" in fetched
    assert not [name for name in fetched if name.endswith(".safetensors")]


def test_weights_that_are_in_the_cache_are_checked(fetched: list[str]) -> None:
    cache = resolve_model("someone/tiny")
    (cache / INDEX).write_text(json.dumps({"weight_map": {"model.layers.0.x": "model.safetensors"}}))
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.0\.x"):
        check_worker(load_config(["--role", "unified", "--model", "someone/tiny"]))


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(resolve_model("demo") / name, tmp_path / name)
    with pytest.raises(ConfigError, match="holds no safetensors weights"):
        check_worker(load_config(["--role", "unified", "--model", str(tmp_path)]))
