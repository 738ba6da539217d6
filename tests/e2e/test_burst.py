"""The drill of a burst, small: every call ends well, and nobody is taken for dead."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import run_script
from tests.e2e.tries import fair


@pytest.mark.timeout(900)
def test_everybody_who_calls_in_the_same_moment_gets_a_whole_answer(tmp_path: Path) -> None:
    figures_path = tmp_path / "burst.json"
    small = ("--max-model-len", "256", "--max-num-batched-tokens", "256")  # there is less to compile
    flags = ("--requests", "400", "--d", "1", "--json", str(figures_path), *small)

    def figures(_: int) -> dict[str, Any]:
        done = run_script("burst.py", *flags, timeout_s=290)
        print(done.stdout, done.stderr, sep="\n")
        assert done.returncode == 0
        found = json.loads(figures_path.read_text())
        assert (found["well"], found["failures"]) == (400, {})
        return found

    found = fair(figures, itemgetter("taken for dead"), "who gets no core for a second is taken for dead, burst or not")
    assert found["taken for dead"] == 0
