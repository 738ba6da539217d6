"""The demonstration shows what it says, without a terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.tries import fair

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1000)
def test_the_plug_is_pulled_and_both_streams_are_identical() -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "COLUMNS": "80"}
    env.pop("XLA_FLAGS", None)
    command = [sys.executable, "scripts/pull_the_plug.py"]
    done = fair(
        lambda _: subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=320, check=False),
        lambda done: "over before the kill" in done.stderr or "nothing noticed" in done.stdout,
        "it kills in the middle of half a second, and says so when it came too late",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical: yes" in done.stdout
    killed = re.search(r"== kill -9 (\d+) ==", done.stdout)
    gap = re.search(r"D pid (\d+) killed; gap (\d+) ms", done.stdout)
    heir = re.search(r"it went on at D pid (\d+) \(.*replay.*\)", done.stdout)
    assert killed is not None
    assert gap is not None
    assert heir is not None
    assert killed[1] == gap[1] != heir[1]
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    log = (ROOT / "out" / "pull-the-plug-right.log").read_text()
    assert f"pid {killed[1]}" in log
    assert "recovering by replay" in log
