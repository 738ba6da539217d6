"""Failed lines may be mended in the input: `--retry-failed` asks for them, and keeps no answer to a line that has changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jdisagg.batch.__main__ import main
from jdisagg.batch.journal import journal_path
from tests.unit.batch.command_line import arguments, write
from tests.unit.batch.fake_server import serving

LINES = [
    '{"prompt": "one"}',
    "not json",
    "",
    '{"prompt": "four", "max_tokens": -1}',
    '{"prompt": "five", "custom_id": "e"}',
    "not json either",
]
MENDED = [LINES[0], '{"prompt": "two"}', "", '{"prompt": "four"}', *LINES[4:]]
FROM_S = 1000.0  # the input's time, which is in all answers


def put(source: Path, lines: list[str]) -> Path:
    write(source, lines)
    os.utime(source, (FROM_S, FROM_S))
    return source


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Of a batch that has run: lines 1 and 5 were answered."""
    source = put(tmp_path / "in.jsonl", LINES)
    with serving() as server:
        assert main(arguments(source, tmp_path / "out.jsonl", server.url)) == 0
        assert server.asked == {'"one"': 1, '"four"': 1, '"five"': 1}
    return source


def test_a_mended_line_is_asked_alone_and_the_output_is_that_of_a_run_of_the_mended_input(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, undisturbed = tmp_path / "out.jsonl", tmp_path / "undisturbed.jsonl"
    first = output.read_bytes()
    put(source, MENDED)
    with serving() as server:
        assert main(arguments(source, output, server.url)) == 2
        assert (
            "differs in lines that failed only: --retry-failed asks for those and keeps all answers" in capsys.readouterr().err
        )
        assert output.read_bytes() == first
        assert main(arguments(source, output, server.url, "--retry-failed")) == 0
        assert capsys.readouterr().err.endswith("4 ok, 1 failed\n")
        assert server.asked == {'"two"': 1, '"four"': 1}
        assert main(arguments(source, undisturbed, server.url)) == 0
    assert output.read_bytes() == undisturbed.read_bytes()
    capsys.readouterr()
    for more in ([], ["--retry-failed"]):
        assert main(arguments(source, output, "http://127.0.0.1:9", *more)) == 0
        said = "nothing was run; what failed is no request: mend it in the input, and --retry-failed asks for those lines alone"
        assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "undisturbed.jsonl"]


@pytest.mark.parametrize(
    ("lines", "flags"),
    [
        (['{"prompt": "another"}', *MENDED[1:]], []),
        (['{"prompt": "one", "max_tokens": 3}', *MENDED[1:]], []),
        (['{"prompt": "one", "seed": 3}', *MENDED[1:]], []),
        (['{"prompt": "one", "custom_id": "a"}', *MENDED[1:]], []),
        (['{"messages": "one"}', *MENDED[1:]], []),
        (["not json", *MENDED[1:]], []),
        (["", *MENDED[1:]], []),
        (["", *MENDED], []),
        ([*MENDED[1:], ""], []),
        ([MENDED[0], "", *MENDED[1:2], *MENDED[3:]], []),  # what was asked on line 2 is on line 3
        (MENDED[:-1], []),
        ([*MENDED, '{"prompt": "six"}'], []),
        ([MENDED[0], '{"prompt": "two", "custom_id": "e"}', *MENDED[2:]], []),  # e is that of line 5
        (MENDED, ["--seed", "1"]),
        (MENDED, ["--model", "demo"]),
    ],
)
def test_an_answer_whose_line_has_changed_is_neither_kept_nor_lost(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str], flags: list[str]
) -> None:
    output = tmp_path / "out.jsonl"
    first = output.read_bytes()
    put(source, lines)
    command = ["--input", str(source), "--output", str(output), "--quiet", "--retry-failed", *flags]
    with serving() as server:
        assert main(command if "--model" in flags else [*command, "--server", server.url]) == 2
        assert not server.asked
    assert "exists and is not the output of this batch" in capsys.readouterr().err
    assert output.read_bytes() == first
    assert not journal_path(output).exists()


def test_interrupted_it_keeps_the_output_and_goes_on_where_it_was(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    first = output.read_bytes()
    put(source, MENDED)
    alone = ("--retry-failed", "--max-concurrency", "1", "--patience-s", "0")
    with serving(dies_of="four", away_s=60.0) as server:
        assert main(arguments(source, output, server.url, *alone)) == 1
        assert server.asked == {'"two"': 1, '"four"': 1}
    assert output.read_bytes() == first
    with serving() as server:
        assert main(arguments(source, output, server.url, *alone)) == 0
        assert server.asked == {'"four"': 1}
    answers = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [answer["response"] and answer["response"]["status_code"] for answer in answers] == [200, 200, 200, 200, None]


def test_a_line_that_repeated_the_name_of_a_mended_one_is_asked_too(tmp_path: Path) -> None:
    lines = ['{"prompt": "one", "custom_id": "a", "max_tokens": -1}', '{"prompt": "two", "custom_id": "a"}', '{"prompt": "x"}']
    source, output = put(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with serving() as server:
        assert main(arguments(source, output, server.url)) == 0
    put(source, ['{"prompt": "one", "custom_id": "b"}', *lines[1:]])
    with serving() as server:
        assert main(arguments(source, output, server.url, "--retry-failed")) == 0
        assert server.asked == {'"one"': 1, '"two"': 1}
    answers = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["b", "a", "line-3"]
    assert all(answer["response"]["status_code"] == 200 for answer in answers)


def test_answers_that_do_not_tell_what_was_asked_are_kept_for_the_same_input_only(source: Path, tmp_path: Path) -> None:
    """As those of earlier versions."""
    output = tmp_path / "out.jsonl"
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if line["response"] is not None:
            line["response"]["request_id"] = f"batch-{line['id'].rpartition('_')[2]}"
    write(output, [json.dumps(line) for line in lines])
    with serving() as server:
        assert main(arguments(source, output, server.url, "--retry-failed")) == 0
        assert server.asked == {'"four"': 1}
        put(source, MENDED)
        assert main(arguments(source, output, server.url, "--retry-failed")) == 2


def test_another_model_does_not_answer_beside_the_one_that_did(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    first = output.read_bytes()
    put(source, MENDED)
    with serving(model="other") as server:
        assert main(arguments(source, output, server.url, "--retry-failed")) == 2
        assert not server.asked
    assert output.read_bytes() == first
    assert not journal_path(output).exists()
