"""The demonstration shows what it says, without a terminal."""

from __future__ import annotations

import re

import pytest
from fleet_process import ROOT

from tests.e2e.processes import run_script
from tests.e2e.tries import fair


@pytest.mark.timeout(1000)
def test_the_plug_is_pulled_and_both_streams_are_identical() -> None:
    done = fair(
        lambda _: run_script("pull_the_plug.py", timeout_s=320, COLUMNS="80"),
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
