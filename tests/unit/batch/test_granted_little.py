"""A batch whose stderr is a file on a full disk, a pipe that nobody reads any more, or closed; and one granted little else."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from jdisagg.batch import progress
from jdisagg.batch.progress import REPORT_EVERY_S, Reports
from tests.unit.batch.fake_server import serving

LIMIT_S = 240
FULL = Path("/dev/full")


class FullDisk(io.StringIO):
    """Takes nothing; `refused` is what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []

    def write(self, text: str) -> int:
        self.refused.append(text)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_progress_that_cannot_be_written_ends_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(progress, "monotonic", lambda: now_s)
    disk = FullDisk()
    monkeypatch.setattr(sys, "stderr", disk)
    report = Reports(10, 1, 0)
    now_s += REPORT_EVERY_S
    report(2, 0)
    begun, later = disk.refused
    assert begun.startswith("jdisagg.batch: 1 of 10 were done before")
    assert later.startswith("jdisagg.batch: 2 of 10 (20%)")


@contextmanager
def full() -> Iterator[int]:
    with FULL.open("ab") as file:
        yield file.fileno()


@contextmanager
def unread() -> Iterator[int]:
    ours, theirs = os.pipe()
    os.close(ours)
    yield theirs
    os.close(theirs)


@pytest.mark.skipif(not FULL.exists(), reason="the system has no such device")
@pytest.mark.parametrize("stderr", [full, unread])
def test_a_batch_ends_well_though_nothing_can_be_said(
    tmp_path: Path, stderr: Callable[[], AbstractContextManager[int]]
) -> None:
    with stderr() as descriptor:
        check(tmp_path, [], descriptor)


def test_a_batch_ends_well_without_standard_streams(tmp_path: Path) -> None:
    check(tmp_path, ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"], subprocess.DEVNULL)


def test_a_batch_takes_as_many_descriptors_as_it_may(tmp_path: Path) -> None:
    """Its shell grants few, and each request under way takes one."""
    check(tmp_path, ["sh", "-c", 'ulimit -S -n 40 && exec "$@"', "sh"], subprocess.DEVNULL, num_lines=100)


def check(directory: Path, prefix: list[str], stderr: int, num_lines: int = 2) -> None:
    """It ends with 0, and with all answers; all are asked for at once."""
    source, output = directory / "in.jsonl", directory / "out.jsonl"
    source.write_text('{"prompt": "x"}\n' * num_lines)
    with serving() as server:
        command = [*prefix, sys.executable, "-m", "jdisagg.batch", "--input", str(source), "--output", str(output)]
        command += ["--server", server.url, "--max-concurrency", "100"]
        ended = subprocess.run(command, stderr=stderr, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0
    assert len(output.read_bytes().splitlines()) == num_lines
