"""What a former run left beside an output, or another process leaves there meanwhile: nothing is asked that was answered."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from jdisagg.batch import __main__ as command_line
from jdisagg.batch.__main__ import main
from jdisagg.batch.journal import Journal, WriteFailed, journal_path
from jdisagg.batch.runner import Batch
from jdisagg.core.errors import Unavailable
from jdisagg.core.settings import load_config
from tests.unit.batch.command_line import arguments, write
from tests.unit.batch.fake_server import serving

LINES = ['{"prompt": "one"}', "not json", "", '{"prompt": "four", "max_tokens": -1}']
NOWHERE = "http://127.0.0.1:9"  # nobody is there
WRITTEN = "jdisagg.batch: the output of a former run is written now, complete by model 'fake', nothing was run; --retry-failed"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", LINES)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def no_room(journal: Journal, numbers: Iterable[int]) -> None:
    raise WriteFailed("out.jsonl.tmp cannot be written: No space left on device")


def without_its_end(source: Path, output: Path, monkeypatch: pytest.MonkeyPatch, **of_server: Any) -> None:
    """Every line answered, and no room for the output."""
    with monkeypatch.context() as patch, serving(**of_server) as server:
        patch.setattr(Journal, "publish", no_room)
        assert main(arguments(source, output, server.url)) == 1
    assert not output.exists()
    assert journal_path(output).read_bytes().count(b"\n") == 4


def test_a_batch_that_lacks_its_output_alone_needs_no_server(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, undisturbed = tmp_path / "out.jsonl", tmp_path / "undisturbed.jsonl"
    with serving() as server:
        assert main(arguments(source, undisturbed, server.url)) == 0
    without_its_end(source, output, monkeypatch)
    capsys.readouterr()
    assert main(arguments(source, output, NOWHERE, "--patience-s", "0")) == 0
    said = capsys.readouterr().err
    assert said.startswith(WRITTEN)
    assert said.endswith("1 ok, 2 failed\n")
    assert output.read_bytes() == undisturbed.read_bytes()
    assert files(tmp_path) == ["in.jsonl", "out.jsonl", "undisturbed.jsonl"]


def test_nor_is_it_kept_from_it_by_a_server_that_has_other_weights_now(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told, then and later, whose answers these are."""
    output = tmp_path / "out.jsonl"
    without_its_end(source, output, monkeypatch, weights="0123456789abcdefcc")
    with serving(weights="fedcba9876543210cc") as server:
        for _ in range(2):
            capsys.readouterr()
            assert main(arguments(source, output, server.url)) == 2
            said = capsys.readouterr().err
            assert "holds answers of model 'fake' with weights 0123456789abcdef, this server has model 'fake' with" in said
            assert b"0123456789abcdefcc" in output.read_bytes()
        assert not server.asked
    assert files(tmp_path) == ["in.jsonl", "out.jsonl"]


def test_its_journal_is_closed_before_lines_that_failed_are_asked_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk that had no room has it back."""
    output, run, opened = tmp_path / "out.jsonl", command_line.run_batch, list[str]()
    without_its_end(source, output, monkeypatch)

    async def looked(*args: Any) -> None:
        for link in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # a connection of the server's that ends just now
                opened.append(os.readlink(link))
        await run(*args)

    with serving() as server:
        monkeypatch.setattr(command_line, "run_batch", looked)
        assert main(arguments(source, output, server.url, "--retry-failed")) == 0
    assert [name for name in opened if "out.jsonl" in name] == [str(journal_path(output))]


def test_interrupted_while_the_output_is_written_no_half_of_it_is_left(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    without_its_end(source, output, monkeypatch)

    def interrupted(journal: Journal, path: Path, numbers: list[int]) -> None:
        path.write_bytes(b"a half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_write_output", interrupted)
        assert main(arguments(source, output, NOWHERE, "--patience-s", "0")) == 1
    assert files(tmp_path) == ["in.jsonl", "out.jsonl.journal"]
    assert main(arguments(source, output, NOWHERE, "--patience-s", "0")) == 0


def test_nor_does_it_need_an_engine(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise Unavailable("an engine is being loaded")

    monkeypatch.setattr(command_line, "keep_freed_memory", load)  # the first step of it
    output = tmp_path / "out.jsonl"
    batch = Batch(input=source, output=output, config=load_config(["--role", "unified", "--model", "demo"]))
    lines = [{"id": f"batch_{batch.id}_{number}", "response": {"status_code": 200}} for number in (1, 2, 4)]
    with Journal(output, batch.header("demo", "w")) as journal:
        journal.append(zip((1, 2), lines, strict=False))
    command = ["--input", str(source), "--output", str(output), "--quiet", "--model", "demo"]
    assert main(command) == 1, "a line is missing"
    with Journal(output, batch.header("demo", "w")) as journal:
        journal.append([(4, lines[2])])
    asked_of_a_server = [*command[:-2], "--server", NOWHERE, "--patience-s", "0"]
    assert main(asked_of_a_server) == 2, "it is another batch's"
    assert main(command) == 0
    assert [json.loads(line) for line in output.read_text().splitlines()] == lines
    assert files(tmp_path) == ["in.jsonl", "out.jsonl"]


def test_killed_when_only_its_journal_was_to_be_removed_a_batch_removes_it(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with serving() as server:
        assert main(arguments(source, output, server.url)) == 0
    first = output.read_bytes()
    with Journal(output, Batch(input=source, output=output).header("fake")) as journal:
        journal.append(zip((1, 2, 4), map(json.loads, first.splitlines()), strict=True))
    assert main(arguments(source, output, NOWHERE, "--patience-s", "0")) == 0
    assert output.read_bytes() == first
    assert files(tmp_path) == ["in.jsonl", "out.jsonl"]


def test_an_output_that_another_process_finishes_meanwhile_is_not_asked_for_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There was neither output nor journal when this one looked; its engine is loaded by now."""
    output, check = tmp_path / "out.jsonl", command_line.check_writable

    def then_it_ends(output: Path) -> None:
        monkeypatch.setattr(command_line, "check_writable", check)
        assert main(arguments(source, output, server.url)) == 0
        capsys.readouterr()

    with serving() as server:
        monkeypatch.setattr(command_line, "check_writable", then_it_ends)
        assert main(arguments(source, output, server.url)) == 0
        assert server.asked.total() == 2
    assert "already complete by model 'fake', nothing was run" in capsys.readouterr().err
    assert files(tmp_path) == ["in.jsonl", "out.jsonl"]


def test_a_journal_whose_lock_was_awaited_may_have_been_removed(tmp_path: Path) -> None:
    """By whoever had it and has published meanwhile: that is done once more, and all is as it was."""
    output, header = tmp_path / "out.jsonl", {"journal": 1}
    with Journal(output, header) as journal:
        journal.append([(1, {"id": 1})])
        journal_path(output).unlink()
        journal.publish([1])
    assert files(tmp_path) == ["out.jsonl"]


def test_asking_again_that_has_kept_no_answer_yet_loses_none_where_nothing_is_to_be_asked_again(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    with serving() as server:
        assert main(arguments(source, output, server.url)) == 0
        first = output.read_bytes()
        with Journal(output, Batch(input=source, output=output).header("fake")):
            pass
        assert main(arguments(source, output, NOWHERE, "--patience-s", "0")) == 0
        assert "already complete by model 'fake'" in capsys.readouterr().err
        assert output.read_bytes() == first
        assert not journal_path(output).exists(), "it would be another batch's when the input is mended"
        server.asked.clear()
        assert main(arguments(source, output, server.url, "--retry-failed")) == 0
        assert server.asked == {'"four"': 1}
    assert files(tmp_path) == ["in.jsonl", "out.jsonl"]


def test_asking_again_that_was_interrupted_is_gone_on_with_though_it_is_not_said_again(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with serving() as server:
        assert main(arguments(source, output, server.url)) == 0
        kept = json.loads(output.read_bytes().splitlines()[1])
        with Journal(output, Batch(input=source, output=output).header("fake")) as journal:
            journal.append([(2, kept)])
        server.asked.clear()
        assert main(arguments(source, output, server.url)) == 0
        assert server.asked == {'"four"': 1}
    assert files(tmp_path) == ["in.jsonl", "out.jsonl"]
