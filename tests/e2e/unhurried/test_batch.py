"""Batches on an engine in the batch's own process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jdisagg.batch.journal import journal_path
from tests.e2e.conftest import SMALL
from tests.e2e.processes import environment
from tests.e2e.tries import fair

LIMIT_S = 200.0  # of what takes some seconds
FLAGS = ("--numerics", "exact", *SMALL)  # compiled by others, on one device


def start(source: Path, output: Path, model: Path, *more: str, stderr: int | None = None) -> subprocess.Popen[bytes]:
    files = ("--input", str(source), "--output", str(output), "--quiet", "--max-concurrency", "4")
    command = [sys.executable, "-m", "jdisagg.batch", *files, "--model", str(model), *FLAGS, *more]
    return subprocess.Popen(command, stderr=stderr, env=environment())


def kill_amid_answers(process: subprocess.Popen[bytes], journal: Path) -> None:
    """Once it has written some answers, if it has not ended by then."""
    try:
        end_s = time.monotonic() + LIMIT_S
        while process.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") > 3):  # one is the header
            assert time.monotonic() < end_s
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.timeout(3 * LIMIT_S)
def test_killed_disaggregated_batch_ends_as_an_undisturbed_unified_one(tiny_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [{"token_ids": [3 + i, 5, 7 + i % 3], "max_tokens": 60, "ignore_eos": True} for i in range(24)]
    source.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"prompt": [], "seed": 1}]), "utf-8")
    unified, killed = tmp_path / "unified.jsonl", tmp_path / "disagg.jsonl"
    assert start(source, unified, tiny_model).wait(LIMIT_S) == 0
    disagg = ("--disagg", "--local-prefill", "never")

    def came_late(_: int) -> bool:
        killed.unlink(missing_ok=True)
        kill_amid_answers(start(source, killed, tiny_model, *disagg), journal_path(killed))
        return killed.exists()

    assert not fair(came_late, bool, "whoever is to kill it stands still while it ends")
    assert start(source, killed, tiny_model, *disagg).wait(LIMIT_S) == 0
    assert killed.read_bytes() == unified.read_bytes()
    answers = [json.loads(line) for line in killed.read_text("utf-8").splitlines()]
    assert [answer["response"]["status_code"] for answer in answers] == [200] * 24 + [400]
    texts = [answer["response"]["body"]["choices"][0]["text"] for answer in answers[:-1]]
    assert len(set(texts)) > 20


@pytest.mark.timeout(2 * LIMIT_S)
def test_an_interrupted_start_does_not_wait_for_what_still_compiles(tiny_model: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "def "}\n', "utf-8")
    process = start(source, output, tiny_model, "--compilation-cache-dir", "off", stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        assert any(line.endswith(b"; compiling\n") for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=LIMIT_S)[1].decode()
    finally:
        process.kill()
        process.wait(10)
    assert process.returncode == 1
    assert said.endswith("interrupted; the same command goes on from here\n")
    assert "executables compiled and run" not in said, "it had compiled everything first"
    assert not output.exists()
    assert not journal_path(output).exists()
