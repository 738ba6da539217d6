"""`--retry-failed`: of a finished output only what failed is asked again, and what was answered is never lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jdisagg.batch.__main__ import main
from jdisagg.batch.journal import Journal, journal_path
from jdisagg.batch.runner import Batch
from tests.unit.batch.fake_server import FakeServer, serving

LATE = (504, json.dumps({"error": {"message": "no answer within the deadline", "type": "timeout"}}).encode())
LOST = (502, json.dumps({"error": {"message": "in flight when 2 workers went down", "type": "handoff_error"}}).encode())
LINES = ['{"prompt": "one"}', "not json", '{"prompt": "two"}', "", '{"prompt": "three"}', '{"prompt": "four"}']


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(LINES) + "\n")
    return path


def arguments(source: Path, output: Path, server: FakeServer, *more: str) -> list[str]:
    return ["--input", str(source), "--output", str(output), "--server", server.url, "--quiet", *more]


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_only_what_failed_is_asked_again_and_the_output_is_that_of_a_run_without_failures(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, undisturbed = tmp_path / "out.jsonl", tmp_path / "undisturbed.jsonl"
    with serving() as server:
        assert main(arguments(source, undisturbed, server)) == 0
    with serving(odd={"two": LATE, "four": LATE}) as server:
        assert main(arguments(source, output, server)) == 0
        first = output.read_bytes()
        capsys.readouterr()
        assert main(arguments(source, output, server)) == 0
        said = capsys.readouterr().err
        assert "nothing was run; --retry-failed asks again for what failed\n" in said
        assert said.endswith("jdisagg.batch: 2 ok, 3 failed\n")
        assert output.read_bytes() == first
    with serving(odd={"four": LATE}) as server:
        assert main(arguments(source, output, server, "--retry-failed")) == 0
        assert server.asked == {'"two"': 1, '"four"': 1}
        assert "3 ok, 2 failed" in capsys.readouterr().err
    with serving() as server:
        assert main(arguments(source, output, server, "--retry-failed")) == 0
        assert server.asked == {'"four"': 1}
        capsys.readouterr()
        assert main(arguments(source, output, server, "--retry-failed")) == 0
        said = capsys.readouterr().err
        assert "already complete by model 'fake', nothing was run; what failed is no request" in said
        assert said.endswith("jdisagg.batch: 4 ok, 1 failed\n"), "a bad line stays one"
        assert server.asked == {'"four"': 1}
    assert output.read_bytes() == undisturbed.read_bytes()
    assert files(tmp_path) == ["in.jsonl", "out.jsonl", "undisturbed.jsonl"]


def test_interrupted_it_keeps_the_output_and_goes_on_where_it_was(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with serving(odd={"one": LATE, "two": LATE, "four": LATE}) as server:
        assert main(arguments(source, output, server)) == 0
    first = output.read_bytes()
    alone = ("--retry-failed", "--max-concurrency", "1", "--patience-s", "0")
    with serving(dies_of="two", away_s=60.0) as server:
        assert main(arguments(source, output, server, *alone)) == 1
        assert server.asked.keys() == {'"one"', '"two"'}
    assert output.read_bytes() == first
    assert journal_path(output).exists()
    with serving() as server:
        assert main(arguments(source, output, server, *alone)) == 0
        assert server.asked == {'"two"': 1, '"four"': 1}
    assert [json.loads(line)["response"] is None for line in output.read_text().splitlines()] == [
        False,
        True,
        False,
        False,
        False,
    ]
    assert files(tmp_path) == ["in.jsonl", "out.jsonl"]


def test_what_is_lost_again_leaves_no_journal_that_cannot_be_finished(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with serving(odd={"two": LOST, "four": LOST}) as server:
        assert main(arguments(source, output, server, "--patience-s", "0.3")) == 0
        first = output.read_bytes()
        assert main(arguments(source, output, server, "--patience-s", "0.3", "--retry-failed")) == 0
        assert server.asked['"one"'] == 1
        assert server.asked['"four"'] > 2
    assert output.read_bytes() == first
    assert files(tmp_path) == ["in.jsonl", "out.jsonl"]


def test_killed_before_it_had_taken_the_answers_it_takes_them_when_repeated(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with serving(odd={"two": LATE}) as server:
        assert main(arguments(source, output, server)) == 0
    with Journal(output, Batch(input=source, output=output).header("fake")):
        pass
    with serving() as server:
        assert main(arguments(source, output, server, "--retry-failed")) == 0
        assert server.asked == {'"two"': 1}


@pytest.mark.parametrize("was_renamed", [True, False])
def test_killed_when_only_its_journal_was_to_be_removed_it_asks_again_all_the_same(
    source: Path, tmp_path: Path, was_renamed: bool
) -> None:
    output = tmp_path / "out.jsonl"
    with serving(odd={"two": LATE}) as server:
        assert main(arguments(source, output, server)) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    with Journal(output, Batch(input=source, output=output).header("fake")) as journal:
        journal.append(zip((1, 2, 3, 5, 6), lines, strict=True))
    if not was_renamed:
        output.unlink()
    with serving() as server:
        assert main(arguments(source, output, server, "--retry-failed")) == 0
        assert server.asked == {'"two"': 1}
    assert files(tmp_path) == ["in.jsonl", "out.jsonl"]


def test_other_weights_do_not_answer_beside_those_that_did(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    with serving(odd={"two": LATE}, weights="0123456789abcdef00") as server:
        assert main(arguments(source, output, server)) == 0
    first = output.read_bytes()
    with serving(weights="fedcba9876543210cc") as server:
        assert main(arguments(source, output, server, "--retry-failed")) == 2
        assert "this server has model 'fake' with weights fedcba9876543210" in capsys.readouterr().err
        assert not server.asked
    assert output.read_bytes() == first
    assert files(tmp_path) == ["in.jsonl", "out.jsonl"]
