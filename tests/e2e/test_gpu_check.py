"""gpu_check in small sizes on a CPU: every section runs, holds, and is reported; what fails or lacks something ends alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fleet_process import ROOT

from tests.e2e.processes import environment, run_script

ALL = (
    *("device", "kernels", "unified", "colocated", "pair-jax", "pair-grpc", "pair-shm", "cpu-decode", "hazards", "moving"),
    *("decode", "prefill", "batch", "aot"),
)
LIMIT_S = 900.0  # it takes about 100 CPU seconds with nothing compiled beforehand


def run_check(out: Path, *flags: str, limit_s: float = LIMIT_S) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Exit status, sections by name, output."""
    command = [sys.executable, "scripts/gpu_check.py", "--out", str(out), *flags]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    report = json.loads((out / "gpu_check.json").read_text())
    return process.returncode, {section["name"]: section for section in report["sections"]}, output


@pytest.mark.timeout(LIMIT_S + 60)
def test_every_section_runs_small_on_a_cpu(tmp_path: Path) -> None:
    status, sections, output = run_check(tmp_path, "--allow-cpu")
    assert status == 0, output
    assert tuple(sections) == ALL
    left_out = [name for name, section in sections.items() if section["status"] != "pass"]
    assert left_out in ([], ["aot"]), output
    for backend in ("jax", "grpc", "shm"):
        held = {check["name"]: check for check in sections[f"pair-{backend}"]["found"]["checks"]}
        assert held["P, D, unified compute the same bits"]["holds"]
        assert held["every stream is unified's"]["detail"] == "24 of 24"
        assert held[f"all KV came over {backend}"]["holds"]
        assert held["every stream goes on as if nothing had happened"]["detail"] == "48 of 48"
        facts = sections[f"pair-{backend}"]["found"]["facts"]
        assert facts["recoveries"] > 0
        assert facts["D_compiled_anew"] is (backend == "shm")
    rates = [row["backend"] for row in sections["moving"]["found"]["tables"]["between two processes"]]
    assert rates == ["plain TCP", "jax", "grpc", "shm", "jax, window of 8 pieces", "jax, no checksums"]
    assert sections["batch"]["found"]["facts"]["answers_equal"] == 4  # transformers', in float32
    targets = [target for section in sections.values() for target in section["found"].get("targets", [])]
    assert len(targets) >= 4
    assert all(target["verdict"] == "not run" and target["why"] for target in targets)  # a CPU meets and misses nothing
    page = (tmp_path / "gpu_check.md").read_text()
    assert all(f"## {name}: " in page for name in ALL)
    assert "| decode | decode step, batch 32, context 1024" in page


@pytest.mark.timeout(60)
def test_an_unknown_section_is_refused_with_the_names_there_are() -> None:
    done = run_script("gpu_check.py", "--sections", "decoed", timeout_s=50)
    assert done.returncode == 2
    assert "decoed unknown, wanted some of device, kernels" in done.stderr


@pytest.mark.timeout(180)
def test_without_an_accelerator_nothing_but_that_is_reported(tmp_path: Path) -> None:
    status, sections, output = run_check(tmp_path, "--sections", "decode", limit_s=150)
    assert status == 3, output
    assert {name: section["status"] for name, section in sections.items()} == {"device": "skip"}
    assert "no accelerator here" in output
