"""The benchmark of streamed tokens, small: its processes find each other, and every stream has the text that was made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.processes import run_script

KINDS = ["completions", "grpc", "chat logprobs"]


@pytest.mark.timeout(300)
def test_streams_of_each_api_are_measured_and_have_the_text_that_their_worker_made_up(tmp_path: Path) -> None:
    figures_path = tmp_path / "stream.json"
    flags = ("--runs", "1", "--streams", "8", "--rate", "400", "--kinds", ",".join(KINDS), "--window-s", "0.5", "--cost-only")
    done = run_script("bench_stream.py", *flags, "--json", str(figures_path), timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(figures_path.read_text())["rows"]
    assert [row["kind"] for row in rows] == KINDS
    assert all(row["tokens_per_chunk"] >= 1 and row["tokens_per_core_s"] > 0 for row in rows)
