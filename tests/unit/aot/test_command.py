"""The command line: whose flags are whose, exit statuses, and that a whole answer comes out of a process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

import jdisagg.aot.run as run_module
from jdisagg.aot.__main__ import main
from jdisagg.aot.command import parse_command
from jdisagg.aot.run import run
from jdisagg.core.errors import ConfigError, NotFetched
from tests.unit.aot.test_budget import MODELS


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """`main` sets what jax reads, for a process of its own: whatever compiled after these tests would not be kept."""
    with patch.dict(os.environ):
        yield


def test_flags_that_are_not_its_own_configure_the_engine(tmp_path: Path) -> None:
    command = parse_command(["--topology", "v6e:2x4", "--tp", "8", "--max-num-seqs", "4", "--no-compile"])
    assert command.config is not None
    assert (command.config.role, command.config.model.tensor_parallel_size) == ("unified", 8)
    assert command.config.scheduler.max_num_seqs == 4
    assert not command.effort.compile
    file = tmp_path / "decode.toml"
    file.write_text('role = "decode"\n')
    from_file = parse_command(["--topology", "cpu", "--config", str(file)]).config
    assert from_file is not None
    assert from_file.role == "decode"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "demo"], "--topology: wanted a kind of device"),
        (["--topology", "cpu", "--max-num-sequences", "4"], "--max-num-sequences: unknown flag; did you mean --max-num-seqs"),
        (["--gates", "--model", "demo"], "--gates: leave out --model"),
        (["--topology", "cpu", "--json", "/nowhere/at/all.json"], "--json: no directory"),
        (["--topology", "cpu", "--json", "/"], "--json: '/' is a directory; name a file in it"),
        (["--topology", "cpu", "--tp", "many"], "--tensor-parallel-size: got 'many'"),
    ],
)
def test_a_command_that_cannot_be_answered_says_what_to_change(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_command(argv)
    assert caught.value.message.startswith(message)


def test_an_answer_that_cannot_be_written_is_no_no(capsys: pytest.CaptureFixture[str]) -> None:
    command = parse_command(["--topology", "cpu", "--model", "demo", "--no-compile", "--json", "/dev/full"])
    with pytest.raises(ConfigError, match="--json: /dev/full cannot be written: No space left on device; name another file"):
        run(command)
    assert "verdict  fits" in capsys.readouterr().out


def test_a_question_that_cannot_be_answered_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--topology", "v9:1", "--model", "demo"]) == 2
    assert capsys.readouterr().err.startswith("jdisagg.aot: --topology: got 'v9:1', wanted one of v5e:2x2")


def test_a_model_that_cannot_be_fetched_now_is_not_said_not_to_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> None:
        raise NotFetched("--model: the Hub says nothing")

    monkeypatch.setattr(run_module, "check", refuse)
    assert main(["--topology", "cpu:1", "--model", "someone/model"]) == 2
    assert capsys.readouterr().err == "jdisagg.aot: --model: the Hub says nothing\n"


@pytest.mark.parametrize(("topology", "status"), [("v6e:1x1", 0), ("v5e:1x1", 1)])
def test_a_process_answers_with_a_table_json_and_its_exit_status(topology: str, status: int, tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    model = str(MODELS / "llama3-8b.json")
    flags = ["--model", model, "--topology", topology, "--no-compile", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "jdisagg.aot", *flags], env=os.environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (status, "")
    answer = json.loads(file.read_text())
    assert answer["fits"] is (status == 0)
    budget = answer["engines"][0]["budget"]
    assert f"{budget['num_pages']:,} pages of 16 tokens" in done.stdout or not answer["fits"]
    assert "verdict  " + ("fits" if status == 0 else "does not fit") in done.stdout
