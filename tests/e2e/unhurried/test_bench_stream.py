"""The benchmark of streamed tokens, small: its processes find each other, and every stream has the text that was made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KINDS = ["completions", "grpc", "chat logprobs"]


@pytest.mark.timeout(300)
def test_streams_of_each_api_are_measured_and_have_the_text_that_their_worker_made_up(tmp_path: Path) -> None:
    figures_path = tmp_path / "stream.json"
    command = [sys.executable, "scripts/bench_stream.py", "--runs", "1", "--streams", "8", "--rate", "400"]
    command += ["--kinds", ",".join(KINDS), "--window-s", "0.5", "--cost-only", "--json", str(figures_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(figures_path.read_text())["rows"]
    assert [row["kind"] for row in rows] == KINDS
    assert all(row["tokens_per_chunk"] >= 1 and row["tokens_per_core_s"] > 0 for row in rows)
