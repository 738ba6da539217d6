"""gpu_check as a process that is struck: nothing it started is left on the device, and the report has what was found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.waiting import until

ROOT = Path(__file__).parents[3]
WAIT_S = 60.0
SECTION = """
import os, subprocess, time
from pathlib import Path


def run(setting, findings):
    findings.fact(before=1)
    (setting.out / "pid.new").write_text(str(os.getpid()))
    (setting.out / "pid.new").rename(setting.out / "pid")
    time.sleep(600)
"""
MAIN = """
import sys
import gpu_check, gpu_kit.sections
from gpu_kit.findings import Target
from gpu_kit.sections import Section

TARGET = Target(name="speed", wanted=1.0, unit="s")
STUCK = Section("stuck", "section_stuck", "hangs", 500.0, ("json",), targets=(TARGET,))
gpu_check.picked = lambda _: [STUCK]
sys.exit(gpu_check.main())
"""


@contextmanager
def stuck(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """gpu_check with a section that hangs, and the pid of that one."""
    (tmp_path / "section_stuck.py").write_text(SECTION)
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), str(tmp_path)])
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "--out", str(tmp_path)], env={**os.environ, "PYTHONPATH": path}, cwd=ROOT
    )
    try:
        until((tmp_path / "pid").exists)
        yield process, int((tmp_path / "pid").read_text())
    finally:
        process.kill()
        process.wait(WAIT_S)


def has_ended(pid: int) -> bool:
    """Gone, or waiting for an init that reaps nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.timeout(200)
@pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")
def test_a_section_ends_when_gpu_check_is_killed(tmp_path: Path) -> None:
    with stuck(tmp_path) as (process, section):
        process.kill()
        assert process.wait(WAIT_S) == -signal.SIGKILL
        until(lambda: has_ended(section))


@pytest.mark.timeout(200)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sigterm_ends_the_section_and_leaves_a_report_of_what_it_found(tmp_path: Path) -> None:
    with stuck(tmp_path) as (process, section):
        process.terminate()
        assert process.wait(WAIT_S) == 128 + signal.SIGTERM
        until(lambda: has_ended(section))
    (found,) = json.loads((tmp_path / "gpu_check.json").read_text())["sections"]
    assert (found["status"], found["reason"]) == ("fail", "gpu_check was ended")
    assert found["found"]["facts"] == {"before": 1}
    assert [line["verdict"] for line in found["found"]["targets"]] == ["not run"]
