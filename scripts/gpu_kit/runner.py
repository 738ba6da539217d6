"""Runs sections as processes with a time limit each: what one does not use of its budget, later ones may."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_kit.child import EXIT_SKIPPED
from gpu_kit.ending import with_our_pid
from gpu_kit.sections import DISTRIBUTIONS, LEAST_VERSIONS, Section

ROOT = Path(__file__).resolve().parents[2]
LEAST_S = 5.0  # a section that gets less is not started
SAVED_S = 3.0  # of a limit: the section is told less than it gets, so that it ends by itself
MOST = 2.0  # budgets that one section may take: what hangs must not eat up what all others saved
TAIL = 1500  # characters of a failed section's stderr
WHY = 80  # characters, behind a target that was not run
OVER = "the time of all sections together is spent"


@dataclass
class Result:
    """How one section ended, and what it found until then."""

    name: str
    status: str  # pass | fail | skip
    seconds: float = 0.0
    cpu_s: float = 0.0  # of all its processes
    limit_s: float = 0.0
    reason: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()  # packages, for which it was skipped


class Budget:
    """The time of all sections together."""

    def __init__(self, total_s: float, *, patience: float = 1.0) -> None:
        """`patience`: times each budget (machines without an accelerator are slow)."""
        self._ends_s = time.monotonic() + total_s
        self._patience = patience
        self._saved_s = 0.0

    def limit_s(self, budget_s: float) -> float:
        """What a section with this budget may take now: it, and what was saved, but not beyond MOST of it."""
        own_s = self._patience * budget_s
        return min(own_s + self._saved_s, MOST * own_s, self._ends_s - time.monotonic())

    def spent(self, budget_s: float, seconds: float) -> None:
        """A section is over."""
        self._saved_s = max(0.0, self._saved_s + self._patience * budget_s - seconds)


def lacking(section: Section) -> list[str]:
    """Packages that the section needs and this machine lacks, by the names that pip knows."""
    return [_asked(name) for name in section.needs if not _exists(name) or _is_old(name)]


def _asked(module: str) -> str:
    """A distribution, with the version that is wanted where that matters."""
    least = LEAST_VERSIONS.get(module)
    return DISTRIBUTIONS.get(module, module) + (f">={'.'.join(map(str, least))}" if least else "")


def _is_old(module: str) -> bool:
    if (least := LEAST_VERSIONS.get(module)) is None:
        return False
    try:
        found = str(importlib.import_module(module).__version__)  # what is imported, wheels on PYTHONPATH first
    except ImportError:
        return True
    return tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < least


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


def run_section(section: Section, out: Path, scratch: Path, budget: Budget, *, small: bool) -> Result:
    """Run one section in a process of its own, so that a crash or a hang ends nothing else. Each of its targets has a line."""
    result = _run_section(section, out, scratch, budget, small=small)
    return replace(result, found=_with_targets(section, result))


def cut_off(section: Section, out: Path) -> Result:
    """What a section had found when gpu_check was ended."""
    result = Result(section.name, "fail", reason="gpu_check was ended", found=_found(_report(section, out)))
    return replace(result, found=_with_targets(section, result))


def _run_section(section: Section, out: Path, scratch: Path, budget: Budget, *, small: bool) -> Result:
    if missing := lacking(section):
        budget.spent(section.budget_s, 0.0)
        return Result(section.name, "skip", reason=f"not installed: {', '.join(missing)}", lacks=tuple(missing))
    limit_s = budget.limit_s(section.budget_s)
    if limit_s < LEAST_S:
        return Result(section.name, "skip", reason=OVER)
    began_s, cpu_before_s = time.monotonic(), _cpu_s()
    (out / "sections").mkdir(parents=True, exist_ok=True)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    log, report = out / "logs" / f"{section.name}.log", _report(section, out)
    report.unlink(missing_ok=True)
    status = _run(_command(section, out, scratch, limit_s, small), log, limit_s)
    seconds = time.monotonic() - began_s
    budget.spent(section.budget_s, seconds)
    found = _found(report)
    verdict, reason = _judge(section.name, status, found, log)
    return Result(
        name=section.name,
        status=verdict,
        seconds=round(seconds, 1),
        cpu_s=round(_cpu_s() - cpu_before_s, 1),
        limit_s=round(limit_s, 1),
        reason=reason,
        found=found,
    )


def _report(section: Section, out: Path) -> Path:
    return out / "sections" / f"{section.name}.json"


def _found(report: Path) -> dict[str, Any]:
    return json.loads(report.read_text()) if report.exists() else {}


def _with_targets(section: Section, result: Result) -> dict[str, Any]:
    """What was found, and a line for each target that the section did not come to."""
    said = result.found.get("targets", [])
    names = {line["name"] for line in said}
    why = " ".join(result.reason.split())[:WHY] or "not measured"
    missing = [target.line(None, why) for target in section.targets if target.name not in names]
    return {**result.found, "targets": [*said, *missing]} if missing else result.found


def _command(section: Section, out: Path, scratch: Path, limit_s: float, small: bool) -> list[str]:
    told_s = max(limit_s - SAVED_S, 1.0)
    command = [sys.executable, "-m", "gpu_kit.child", section.name, "--module", section.module, "--out", str(out)]
    return [*command, "--scratch", str(scratch), "--limit-s", f"{told_s:.1f}", *(["--small"] if small else [])]


def _run(command: list[str], log: Path, limit_s: float) -> int | None:
    """Exit status; None when it had to be killed. What it leaves in its group is killed; servers it started end with it."""
    paths = [str(ROOT), str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**with_our_pid(os.environ), "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, process_group=0)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _cpu_s() -> float:
    """Of processes that were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _judge(name: str, status: int | None, found: dict[str, Any], log: Path) -> tuple[str, str]:
    if status == EXIT_SKIPPED:
        return "skip", found.get("left_out", {}).get(name, "cannot run here")
    if status is None:
        return "fail", "out of time; what it found until then is kept"
    if status != 0:
        return "fail", f"exit status {status}: {log.read_text(errors='replace').strip()[-TAIL:]}"
    broken = [check["name"] for check in found.get("checks", []) if not check["holds"]]
    return ("fail", f"does not hold: {', '.join(broken)}") if broken else ("pass", "")
