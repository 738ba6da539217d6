"""Checks on a real accelerator: devices, kernels against the CPU, one engine, and P and D as two processes on one device.

Usage: gpu_check.py --out DIR [--allow-cpu]. Writes DIR/gpu_check.json, DIR/gpu_check.md and the servers' logs. Each section
passes, fails or is skipped with a reason; the exit status is 0 when none failed and an accelerator was there (or --allow-cpu).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUDGET_S = 460.0
SECTION_TIMEOUT_S = 220.0
SERVER_MODULES = (
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "starlette",
    "uvicorn",
    "uvloop",
    "tokenizers",
    "prometheus_client",
    "jinja2",
)
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "grpcio", "jax-cuda13-plugin", "jax-cuda12-plugin")
SECTIONS = ("device", "kernels", "unified", "pair")


@dataclass
class Section:
    """One result."""

    name: str
    status: str  # pass | fail | skip
    seconds: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)


def run_section(name: str, out: Path, left_s: float) -> Section:
    """Run one section in a process of its own, so that a crash or a hang ends nothing else."""
    began_s = time.monotonic()
    command = [sys.executable, str(ROOT / "scripts" / "gpu_sections.py"), name, str(out)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=min(left_s, SECTION_TIMEOUT_S), check=False)
    except subprocess.TimeoutExpired:
        return Section(name, "fail", time.monotonic() - began_s, {"error": "out of time"})
    seconds = round(time.monotonic() - began_s, 2)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        found = json.loads(lines[-1])
        return Section(name, "pass" if found.pop("ok") else "fail", seconds, found)
    return Section(name, "fail", seconds, {"error": f"exit {done.returncode}: {done.stderr.strip()[-1500:]}"})


def missing(modules: tuple[str, ...]) -> list[str]:
    """Modules that cannot be imported here."""
    return [module for module in modules if importlib.util.find_spec(module) is None]


def version(package: str) -> str | None:
    """Installed version, if any."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Commit of the working tree; "unknown" outside a repository."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout.strip() or "unknown"


def markdown(report: dict[str, Any]) -> str:
    """The report as one table."""
    lines = [
        f"# GPU check, {report['device']}",
        "",
        f"commit {report['commit']}, Python {report['python']}, {report['packages']}",
        "",
    ]
    lines += ["| section | result | seconds | detail |", "| --- | --- | --- | --- |"]
    for section in report["sections"]:
        detail = json.dumps(section["detail"]).replace("|", "/")
        lines.append(f"| {section['name']} | {section['status']} | {section['seconds']:.1f} | {detail[:600]} |")
    return "\n".join(lines) + "\n"


def main(run: Callable[[str, Path, float], Section] = run_section) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the reports")
    parser.add_argument("--allow-cpu", action="store_true", help="a machine without an accelerator is no failure")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    began_s = time.monotonic()
    sections: list[Section] = []
    for name in SECTIONS:
        lacking = missing(SERVER_MODULES) if name in ("unified", "pair") else []
        left_s = BUDGET_S - (time.monotonic() - began_s)
        if lacking:
            sections.append(Section(name, "skip", 0.0, {"reason": f"not installed: {', '.join(lacking)}"}))
        elif left_s < 10:
            sections.append(Section(name, "skip", 0.0, {"reason": f"the budget of {BUDGET_S:.0f} s is spent"}))
        else:
            sections.append(run(name, out, left_s))
        print(
            f"{sections[-1].status:4}  {name}  {sections[-1].seconds:.1f} s  {json.dumps(sections[-1].detail)[:400]}",
            flush=True,
        )
    report = {
        "device": sections[0].detail.get("kind", "unknown"),
        "platform": sections[0].detail.get("platform", "unknown"),
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := version(name))},
        "sections": [asdict(section) for section in sections],
    }
    (out / "gpu_check.json").write_text(json.dumps(report, indent=1))
    (out / "gpu_check.md").write_text(markdown(report))
    if report["platform"] == "cpu" and not options.allow_cpu:
        print("no accelerator here: nothing was shown about one (--allow-cpu accepts that)")
        return 3
    return 1 if any(section.status == "fail" for section in sections) else 0


if __name__ == "__main__":
    sys.exit(main())
