"""The offline evaluation gives the scores that transformers gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TASKS = Path("configs/eval")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["choice", "generate", "perplexity"])
def test_scores_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    result = tmp_path / "scores.json"
    command = [sys.executable, "scripts/eval_batch.py", kind, "--task", str(TASKS / f"{kind}.jsonl"), "--limit", "2"]
    options = ["--reference", "transformers", "--json", str(result), "--num-pages", "200", "--max-num-seqs", "4", "--quiet"]
    subprocess.run(command + options, check=True, timeout=220, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    scores = json.loads(result.read_text("utf-8"))["scores"]
    assert scores["jdisagg"] == pytest.approx(scores["transformers"], abs=1e-3)
    assert scores["jdisagg"].keys() == scores["transformers"].keys()
