"""What a batch says on stderr while it runs."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from jdisagg.batch.__main__ import main
from jdisagg.batch.journal import Journal
from jdisagg.batch.progress import Reports
from jdisagg.batch.runner import Batch, Finished
from tests.unit.batch.fake_server import serving

LIMIT_S = 60


def lines(numbers: range, status_code: int) -> list[Finished]:
    return [(number, {"id": f"batch_b_{number}", "response": {"status_code": status_code}}) for number in numbers]


def test_a_file_gets_a_line_now_and_then_with_the_rate_since_the_one_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("jdisagg.batch.progress.monotonic", lambda: now_s)
    report = Reports(200_000, 50_000, 7)
    for done in range(50_100, 56_001, 100):
        now_s += 1.0
        report(done, 7 + min(1000, done - 50_000))
    now_s += 9.0
    report(56_001, 1008)
    now_s += 31.0
    report(56_600, 1008)
    assert capsys.readouterr().err.splitlines() == [
        "jdisagg.batch: 50000 of 200000 were done before, 7 failed",
        "jdisagg.batch: 53000 of 200000 (26%), 1007 failed; 100 requests/s, 24:30 left",
        "jdisagg.batch: 56000 of 200000 (28%), 1007 failed; 100 requests/s, 24:00 left",
        "jdisagg.batch: 56600 of 200000 (28%), 1008 failed; 15 requests/s, 2:39:20 left",
    ]


def test_a_progress_line_is_no_bar_where_nobody_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of a hundred thousand redraws is a line of megabytes, which shippers of logs cut or keep to the end."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n' * 3)
    with serving() as server:
        assert main(["--input", str(source), "--output", str(tmp_path / "out.jsonl"), "--server", server.url]) == 0
    assert capsys.readouterr().err == "jdisagg.batch: 3 ok, 0 failed\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "said"), [(io.StringIO, "2 of 3 were done before, 1 failed"), (Terminal, r"2/3 \[[^]]*, 1 failed\]")]
)
def test_what_failed_before_an_interruption_is_counted_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: type[io.StringIO], said: str
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "x"}\n{"prompt": "y"}\nno request\n')
    batch = Batch(input=source, output=output)
    with Journal(output, batch.header("fake")) as journal:
        journal.append([*lines(range(1, 2), 200), *lines(range(2, 3), 404)])
    monkeypatch.setattr(sys, "stderr", stream := stderr())
    with serving() as server:
        assert main(["--input", str(source), "--output", str(output), "--server", server.url]) == 0
    assert re.search(said, stream.getvalue())
    assert stream.getvalue().endswith("1 ok, 2 failed\n")


def test_a_batch_whose_server_exchanged_its_weights_says_whose_answers_it_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "x"}\n{"prompt": "new"}\n{"prompt": "y"}\n{"prompt": "z", "max_tokens": -1}\n')
    odd = {"new": (200, b'{"model": "fake", "system_fingerprint": "fedcba9876543210cc"}')}
    with serving(weights="0123456789abcdefcc", odd=odd) as server:
        assert main(["--input", str(source), "--output", str(output), "--server", server.url, "--quiet"]) == 0
    changed = "the weights changed while the batch ran, these are answers 2 of 0123456789abcdef, 1 of fedcba9876543210"
    assert capsys.readouterr().err.splitlines()[-1] == f"jdisagg.batch: 3 ok, 1 failed; {changed}"


def test_a_bar_on_a_terminal_counts_failures_and_is_not_torn_by_what_is_logged(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n{"prompt": "y", "max_tokens": -1}\n')
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (25, 120))
    with serving(refusals=sys.maxsize) as server, os.fdopen(ours, "rb", 0) as terminal:
        command = [sys.executable, "-m", "jdisagg.batch", "--input", str(source), "--output", str(tmp_path / "out.jsonl")]
        process = subprocess.Popen([*command, "--server", server.url], stderr=theirs)
        os.close(theirs)
        said = b""
        try:
            while block := _read(terminal):
                said += block
                if b"waiting for the server" in said:
                    server.refusals = 0
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()
            process.wait(LIMIT_S)
    assert re.search(rb"2/2 \[.*, 1 failed\]", said)
    (logged,) = [line for line in re.split(rb"[\r\n]", said) if b"waiting for the server" in line]
    assert b"req/s" not in logged


def _read(terminal: io.RawIOBase) -> bytes:
    try:
        return terminal.read(4096) or b""
    except OSError:  # the other end is closed
        return b""
