"""The offline evaluation gives the scores that transformers gives."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.processes import environment, run_script

TASKS = Path("configs/eval")


@pytest.mark.parametrize("kind", ["choice", "generate", "perplexity"])
def test_scores_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    result = tmp_path / "scores.json"
    flags = ("--task", str(TASKS / f"{kind}.jsonl"), "--limit", "2", "--reference", "transformers", "--json", str(result))
    small = ("--num-pages", "200", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")  # less to compile
    done = run_script("eval_batch.py", kind, *flags, "--quiet", *small, timeout_s=400, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    scores = json.loads(result.read_text("utf-8"))["scores"]
    assert scores["jdisagg"] == pytest.approx(scores["transformers"], abs=1e-3)
    assert scores["jdisagg"].keys() == scores["transformers"].keys()


def test_an_evaluation_that_is_interrupted_while_its_engine_starts_leaves_no_files(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/eval_batch.py", "choice", "--task", str(TASKS / "choice.jsonl"), "--quiet"]
    scratch, nothing_compiled = tmp_path / "scratch", tmp_path / "cache"
    scratch.mkdir()
    env = environment(TMPDIR=str(scratch), JAX_COMPILATION_CACHE_DIR=str(nothing_compiled))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs behind the scenes inherits "ignored"
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGINT, before)
        try:
            until_s = time.monotonic() + 200.0
            while not list(scratch.glob("*/in.jsonl")) and time.monotonic() < until_s:
                time.sleep(0.05)
            time.sleep(2.0)  # the event loop runs, the engine compiles
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=200.0)
        finally:
            process.kill()
    assert process.returncode == 1, said
    assert said.endswith("jdisagg.batch: interrupted; without --work-dir nothing is kept, the same command begins anew\n")
    assert list(scratch.iterdir()) == []
