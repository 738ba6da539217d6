"""What is told of a finished output, or of one that is not finished yet."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jdisagg.batch.journal import journal_path
from jdisagg.batch.lines import BadLine, Call
from jdisagg.batch.results import answer_line, bad_answer_line, error_line
from jdisagg.batch.summary import NAMED, summary
from tests.unit.batch.command_line import arguments
from tests.unit.batch.fake_server import serving

LIMIT_S = 60


def call(number: int, custom_id: str | None = None) -> Call:
    return Call(number, custom_id or f"line-{number}", "/v1/completions", {"prompt": "x"})


def answered(asked: Call, status_code: int = 200, **body: Any) -> dict[str, Any]:
    return answer_line(asked, status_code, body, batch_id="b", request_id="r", created=9)


def told(directory: Path, lines: list[dict[str, Any]]) -> list[str]:
    path = directory / "out.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return summary(path).told(path)


def test_a_finished_output_is_counted_by_the_weights_that_answered(tmp_path: Path) -> None:
    def by(weights: object) -> dict[str, Any]:
        return answered(call(1), system_fingerprint=weights)

    late = answered(call(2), 504)
    assert told(tmp_path, [by("w"), by("w"), late, late])[-1] == "2 ok, 2 failed"
    several = [by("w" * 20), by("w" * 20), by("v"), by("v"), by("v"), late, by(5)]
    shares = f"3 of v, 2 of {'w' * 16}, 1 of unknown ones"
    assert told(tmp_path, several)[-1] == (
        f"6 ok, 1 failed; the weights changed while the batch ran, these are answers {shares}"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (answered(call(51), 400, error={"message": "too long"}), "line 51: HTTP 400: too long"),
        (answered(call(51, "a\n\x1b"), 400, error={"message": "too long"}), "line 51 ('a\\n\\x1b'): HTTP 400: too long"),
        (answered(call(51), 500, error={"message": "two\nlines \x1b[2J"}), "line 51: HTTP 500: two\\nlines \\x1b[2J"),
        (answered(call(5), 404, detail="Not Found"), 'line 5: HTTP 404: {"detail":"Not Found"}'),
        (answered(call(5), 404, error={"message": ""}), 'line 5: HTTP 404: {"error":{"message":""}}'),
        (answered(call(5), 404, error="gone"), 'line 5: HTTP 404: {"error":"gone"}'),
        (error_line(BadLine(5, None, "line 5 is not JSON: x"), batch_id="b"), "line 5 is not JSON: x"),
        (error_line(BadLine(5, "a", "line 5: method must be POST"), batch_id="b"), "line 5 ('a'): method must be POST"),
        (error_line(BadLine(5, None, "line 55 is"), batch_id="b"), "line 5: line 55 is"),
        (bad_answer_line(call(5, "a"), "no JSON", batch_id="b"), "line 5 ('a'): no JSON"),
    ],
)
def test_a_failed_line_is_named_with_what_is_wrong(tmp_path: Path, line: dict[str, Any], said: str) -> None:
    assert told(tmp_path, [answered(call(1)), line]) == [f"failed: {said}", "1 ok, 1 failed"]


def test_a_long_name_and_a_long_reason_are_cut(tmp_path: Path) -> None:
    first, _ = told(tmp_path, [answered(call(1, "n" * 999), 400, error={"message": "r" * 9999})])
    assert len(first) < 400


@pytest.mark.parametrize("num_failed", [NAMED - 1, NAMED, NAMED + 1, NAMED + 20])
def test_of_many_failed_lines_the_first_are_named_and_the_others_counted(tmp_path: Path, num_failed: int) -> None:
    *named, last = told(tmp_path, [answered(call(n), 500, error={"message": "oops"}) for n in range(1, num_failed + 1)])
    assert last == f"0 ok, {num_failed} failed"
    assert named[:NAMED] == [f"failed: line {n}: HTTP 500: oops" for n in range(1, min(NAMED, num_failed) + 1)]
    assert [text.split(";")[0] for text in named[NAMED:]] == [f"failed: {num_failed - NAMED} more"] * (num_failed > NAMED)
    assert all(str(tmp_path / "out.jsonl") in text for text in named[NAMED:])


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_batch_that_is_interrupted_tells_how_many_are_done(tmp_path: Path, sent: signal.Signals) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "x"}\nno request\n{"prompt": "y"}\n', encoding="utf-8")
    with serving(together=3) as server:  # nothing is answered
        command = [sys.executable, "-c", STARTED, *arguments(source, output, server.url)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            journal = journal_path(output)
            while process.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") == 2):
                time.sleep(0.01)
            process.send_signal(sent)
            _, said = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
            process.wait(LIMIT_S)
    assert process.returncode == 1
    assert said.endswith("jdisagg.batch: 1 of 3 are done\njdisagg.batch: interrupted; the same command goes on from here\n")


# what a shell runs behind the scenes inherits an ignored SIGINT
STARTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from jdisagg.batch.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
