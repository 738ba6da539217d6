from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

import jdisagg.convert as module
from jdisagg.convert import convert, main
from jdisagg.core.config import ModelConfig
from jdisagg.core.errors import ConfigError, NotFetched
from jdisagg.models.load import LoadedModel, load_model
from jdisagg.models.resolve import generation_defaults
from jdisagg.models.sharding import make_mesh
from jdisagg.models.spec import ModelSpec
from tests.unit.models.conftest import CONFIG, tensors_of, write_model

Process = subprocess.Popen[bytes]


def load(directory: Path) -> LoadedModel:
    return load_model(ModelConfig(model=str(directory)), make_mesh(jax.devices(), 1), seed=0)


def test_a_converted_model_is_the_same_model(model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generation = {"eos_token_id": [3, 5], "temperature": 0.6, "top_k": 20, "do_sample": True}
    (model_directory / "generation_config.json").write_text(json.dumps(generation))
    (model_directory / "tokenizer.json").write_text("{}")
    (model_directory / "chat_template.jinja").write_text("{{ messages }}")
    (model_directory / "additional_chat_templates").mkdir()
    (model_directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    output = tmp_path / "converted"
    assert main(["--model", str(model_directory), "--output", str(output)]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == str(output)
    model = load(output)
    assert model.fingerprint == load(model_directory).fingerprint
    assert model.eos_token_ids == (3, 5)
    assert generation_defaults(output) == {"temperature": 0.6, "top_k": 20}
    assert (output / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (output / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert not (output / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_dtype_is_stored(model_directory: Path, tmp_path: Path) -> None:
    convert(model_directory, tmp_path / "halved", dtype="bfloat16")
    assert json.loads((tmp_path / "halved" / "config.json").read_text())["dtype"] == "bfloat16"
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        config = ModelConfig(model=str(tmp_path / "halved"), dtype=dtype)
        sizes[dtype] = load_model(config, make_mesh(jax.devices(), 1), seed=0).params["norm"]["scale"]
    assert (sizes["float32"] == sizes["bfloat16"].astype("float32")).all()


@pytest.mark.parametrize(
    ("stored", "named", "kept"),
    [
        (("float32", "float32"), "bfloat16", "float32"),
        (("bfloat16", "bfloat16"), "float16", "bfloat16"),
        (("float16", "float16"), None, "float16"),
        (("bfloat16", "float32"), "bfloat16", "float32"),
        (("bfloat16", "float16"), "float16", "float32"),
    ],
)
def test_what_is_stored_is_kept_whatever_config_json_calls_it(
    tmp_path: Path, tensors: dict[str, np.ndarray], stored: tuple[str, str], named: str | None, kept: str
) -> None:
    """Rounded to another type they would be other weights: workers of the two directories would not pair."""
    cast = {name: (value * 1e-6).astype(stored[name.endswith("norm.weight")]) for name, value in tensors.items()}
    source = write_model(tmp_path / "source", cast, torch_dtype=named)
    convert(source, tmp_path / "converted", dtype=None)
    assert json.loads((tmp_path / "converted" / "config.json").read_text())["dtype"] == kept
    assert load(tmp_path / "converted").fingerprint == load(source).fingerprint


def test_it_refuses_to_overwrite(model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "there"
    output.mkdir()
    assert main(["--model", str(model_directory), "--output", str(output)]) == 2
    assert "there exists; give a new name" in capsys.readouterr().err
    assert list(output.iterdir()) == []


def test_a_model_that_cannot_be_fetched_now_is_no_bad_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: str) -> None:
        raise NotFetched("--model: the Hub says nothing")

    monkeypatch.setattr(module, "resolve_model", refuse)
    assert main(["--model", "someone/model", "--output", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "jdisagg.convert: --model: the Hub says nothing\n"


@pytest.mark.parametrize("output", ["/proc/converted", "x" * 300])
def test_a_place_that_cannot_be_written_is_one_line(
    model_directory: Path, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(model_directory), "--output", output]) == 2
    message = capsys.readouterr().err
    assert message.startswith("jdisagg.convert: --output: ")
    assert "choose another" in message
    assert message.count("\n") == 1


def test_a_full_disk_is_one_line_and_leaves_nothing(model_directory: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jdisagg.convert", "--model", str(model_directory), "--output", str(tmp_path / "out")]
    # KiB of one file; bytecode is cut off there without an error, and nobody could read it afterwards
    limited = ["bash", "-c", 'ulimit -f 2; PYTHONDONTWRITEBYTECODE=1 exec "$@"', "bash", *command]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert "\njdisagg.convert: --output: " in "\n" + done.stderr  # beside what Orbax logs
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


WRITES_ON = """
import sys, threading, time
import jdisagg.convert as module

def save(directory, spec, params):
    def write():
        while directory.exists():
            time.sleep(0.02)
        (directory / "late").mkdir(parents=True)

    threading.Thread(target=write).start()
    raise ValueError("the disk is full")

module.save_orbax = save
sys.exit(module.main(sys.argv[1:]))
"""


def test_what_threads_of_a_failed_conversion_write_afterwards_is_removed(model_directory: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES_ON, "--model", str(model_directory), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, "cannot be written: the disk is full" in done.stderr) == (2, True), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_threads_of_a_failed_conversion_write_on_in_a_process_that_stood_still(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes what they write for a while after the last of it: they had no turn in the meantime."""
    gone: list[bool] = []

    def stand_still(_: float) -> None:
        if not gone:
            time.sleep(1.0)
            (tmp_path / removed / "late").mkdir(parents=True)
        gone.append(not (tmp_path / removed).exists())

    def fail(directory: Path, *_: object) -> None:
        nonlocal removed
        removed = directory.name
        raise ValueError("the disk is full")

    removed = ""
    monkeypatch.setattr(module, "save_orbax", fail)
    monkeypatch.setattr(module, "sleep", stand_still)
    with pytest.raises(ConfigError, match="the disk is full"):
        convert(model_directory, tmp_path / "out", dtype=None)
    assert (gone[0], all(gone[1:])) == (False, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_failed_conversion_leaves_nothing(model_directory: Path, tmp_path: Path) -> None:
    (model_directory / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match="not readable as safetensors"):
        convert(model_directory, tmp_path / "out", dtype=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("is_orbax", [False, True])
def test_a_model_without_safetensors_is_told_of_as_such(
    is_orbax: bool, model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = model_directory
    if is_orbax:
        source = tmp_path / "converted"
        assert main(["--model", str(model_directory), "--output", str(source)]) == 0
    else:
        (source / "model.safetensors").rename(source / "pytorch_model.bin")
    capsys.readouterr()
    assert main(["--model", str(source), "--output", str(tmp_path / "again")]) == 2
    assert f"--model: {source} holds no safetensors weights" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def ended_as_it_writes(tmp_path: Path, model_directory: Path, end: Callable[[Process], None]) -> tuple[int, bytes]:
    """The status, and what it said, of a conversion of dozens of MB that is ended in the midst of its writing: one that was
    done before `end` had its turn is no such one, and is begun again."""
    big = {**CONFIG, "hidden_size": 256, "intermediate_size": 2048, "vocab_size": 8192, "num_hidden_layers": 6}
    write_model(model_directory, tensors_of(ModelSpec.from_config(big)), **big)
    output = tmp_path / "out"
    command = [sys.executable, "-m", "jdisagg.convert", "--model", str(model_directory), "--output", str(output)]
    for _ in range(5):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, process_group=0) as process:
            try:
                while not list(tmp_path.glob(".out.partial-*/orbax*")) and process.poll() is None:
                    time.sleep(0.002)
                if process.poll() is None:
                    end(process)
                _, said = process.communicate(timeout=120.0)
            finally:
                process.kill()
        if not output.exists():
            break
        shutil.rmtree(output)
    return process.returncode, said


def test_a_killed_conversion_leaves_nothing_that_loads(tmp_path: Path, model_directory: Path) -> None:
    status, _ = ended_as_it_writes(tmp_path, model_directory, lambda process: os.killpg(process.pid, signal.SIGKILL))
    assert status == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    partials = list(tmp_path.glob(".out.partial-*"))
    assert len(partials) == 1, "the kill came while it was writing"
    with pytest.raises(ConfigError):
        load(partials[0])


def test_a_conversion_that_is_told_to_end_leaves_nothing(tmp_path: Path, model_directory: Path) -> None:
    def tell(process: Process) -> None:
        process.terminate()
        process.terminate()  # as whoever is impatient

    assert ended_as_it_writes(tmp_path, model_directory, tell) == (128 + signal.SIGTERM, b"")
    assert list(tmp_path.glob("*out*")) == []
    assert list(tmp_path.glob(".out.partial-*")) == []
