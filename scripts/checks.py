"""Runs every check and prints one report: format, lint, types, layers, generated code, protos, metrics, then the tests.

Usage: checks.py [--quick] [pytest arguments]. Everything runs even when something fails. Tests run in as many processes as keep
two cores busy, file by file: six where they mostly wait, two where they start servers and judge no time; those that judge it
run one after the other. What only computes runs beside the checks, what waits and what judges time, in two processes, and gets
what these leave over of the cores (on Linux: elsewhere, and in a sandbox that forbids it, it runs before). promtool, which no
Python package brings, runs when it is installed; what it would check is listed as SKIPPED otherwise. The last line counts
checks and tests together, in pytest's words; the exit status is 0 when nothing failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CODE = ("jdisagg", "pallas_kernels", "scripts", "tests")
METRICS_TEXT = "import sys; from jdisagg.core.metrics import Metrics; sys.stdout.write(Metrics().text())"
WAITING = tuple(  # those with the longest tests first: no process shall begin one when the others have ended
    f"tests/unit/{part}"
    for part in ("gpu_check", "transfer", "batch", "serve", "router", "wire", "api_edge", "roles", "chaos", "core")
)
UNHURRIED = ("tests/e2e/unhurried", "tests/e2e/in_process")  # servers, and nothing that judges their time
CACHE = "JAX_COMPILATION_CACHE_DIR"
CHECK_TIMEOUT_S = 300
TESTS_TIMEOUT_S = 3600  # of one pytest
CLEAN_UP_S = 60
NOTHING_SELECTED = 5  # pytest's exit status


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A command that must exit 0. `tool`: skip when it is not installed."""

    name: str
    command: tuple[str, ...]
    tool: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """Tests that run together."""

    paths: tuple[str, ...]
    num_processes: int = 1
    ignored: tuple[str, ...] = ()  # of what the paths hold

    def arguments(self) -> list[str]:
        """pytest's."""
        in_order = (f"--numprocesses={self.num_processes}", "--dist=loadfile", "--no-loadscope-reorder")
        spread = in_order if self.num_processes > 1 else ()
        return [*self.paths, *(f"--ignore={path}" for path in self.ignored), *spread]


def _idle() -> int | None:
    """The policy of what makes way at once for whatever has another one; None where there is none, or nobody may have it."""
    policy: int | None = getattr(os, "SCHED_IDLE", None)
    if policy is None:
        return None
    with ThreadPoolExecutor(1) as pool:  # whose thread keeps it, and ends
        refused = pool.submit(os.sched_setscheduler, 0, policy, os.sched_param(0)).exception()
    return None if refused else policy


IDLE = _idle()
QUICK, QUICK_COMPUTING = (Part(WAITING, 6),), Part(("tests/compat", "tests/unit"), 2, WAITING)
ALL = (*QUICK, Part(("tests/e2e",), ignored=UNHURRIED))
COMPUTING = Part(("tests/kernels", "tests/golden", *QUICK_COMPUTING.paths), 2, WAITING)
LAST = Part(UNHURRIED, 2)  # both cores are busy with it: what ran beside it would come to its time limits


@dataclass
class Tally:
    """What the closing line counts."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, other: Tally) -> None:
        """Count what another one has counted."""
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def all(self) -> int:
        """Everything so far."""
        return self.passed + self.failed + self.skipped

    def line(self, seconds: float) -> str:
        """pytest's closing line."""
        counts = [("failed", self.failed), ("passed", self.passed), ("skipped", self.skipped)]
        return f" {', '.join(f'{n} {word}' for word, n in counts if n)} in {seconds:.2f}s ".center(80, "=")


def checks(generated: Path) -> list[Check]:
    """The static checks; generated code is made again under `generated` and compared."""
    python, buf = str(BIN / "python"), str(BIN / "buf")
    return [
        Check(name="format", command=(str(BIN / "ruff"), "format", "--check", "--quiet", *CODE)),
        Check(name="lint", command=(str(BIN / "ruff"), "check", "--quiet", *CODE)),
        Check(name="types", command=(str(BIN / "basedpyright"), "--level", "error")),
        Check(name="layers", command=(str(BIN / "lint-imports"), "--no-cache")),
        Check(name="generated code is current", command=("bash", "scripts/check_proto.sh", str(generated))),
        Check(name="protos", command=(buf, "lint", "proto")),
        Check(
            name="protos, against the first v1", command=(buf, "breaking", "proto", "--against", "tests/compat/v1/first.binpb")
        ),
        Check(
            name="metrics (promtool)",
            command=("bash", "-o", "pipefail", "-c", f"'{python}' -c '{METRICS_TEXT}' | promtool check metrics"),
            tool="promtool",
        ),
        Check(
            name="alerts (promtool)",
            command=("promtool", "test", "rules", "configs/prometheus/jdisagg_test.yml"),
            tool="promtool",
        ),
    ]


def run_check(check: Check, tally: Tally, skipped: list[str]) -> None:
    """Run one check and report it on one line, with its output when it fails."""
    if check.tool and shutil.which(check.tool) is None:
        tally.skipped += 1
        skipped.append(f"{check.name}: {check.tool} is not installed")
        return
    began_s = time.monotonic()
    try:
        done = subprocess.run(
            check.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=CHECK_TIMEOUT_S,
            check=False,
        )
        status, output = done.returncode, done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired:
        status, output = -1, f"not finished after {CHECK_TIMEOUT_S} s"
    good = status == 0
    tally.passed += good
    tally.failed += not good
    print(f"{'ok    ' if good else 'FAILED'}  {check.name}  ({time.monotonic() - began_s:.1f} s)", flush=True)
    if not good:
        print(output, flush=True)


def run_tests(part: Part, options: list[str], tally: Tally, output: IO[str] | None = None) -> None:
    """Run pytest on it and add its counts. Options that select nothing there are no failure. With `output` it writes there, and
    takes only time that nobody else wants."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [str(BIN / "pytest"), *part.arguments(), "-q", "--durations=15", f"--junit-xml={report}", *options]
        with subprocess.Popen(command, stdout=output, stderr=output) as pytest:
            if output is not None and IDLE is not None:
                os.sched_setscheduler(pytest.pid, IDLE, os.sched_param(0))
            status = _wait(pytest, time.monotonic() + TESTS_TIMEOUT_S)
        _count(report, status, tally)


@contextmanager
def beside(part: Part, options: list[str], tally: Tally) -> Iterator[None]:
    """Run its tests while the block runs, and until they have ended; then show and count them. What broke off is shown, too."""
    counted = Tally()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            with ThreadPoolExecutor(1) as pool:
                tests = pool.submit(run_tests, part, options, counted, output)
                if IDLE is None:
                    tests.result()
                yield
            tests.result()
        finally:
            output.seek(0)
            print(output.read(), flush=True)
    tally.add(counted)


def keep_compiled(directory: Path) -> None:
    """What one process compiles, the others find: programs of jax and bytecode, which hundreds of them would make anew where
    it is not written beside the sources."""
    os.environ.setdefault(CACHE, str(directory / "xla"))
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ["PYTHONPYCACHEPREFIX"] = str(directory / "bytecode")


def _count(report: Path, status: int, tally: Tally) -> None:
    """Add a report's counts; a run that broke off counts as a failure."""
    failed = 0
    if report.exists():
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            num = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
            failed += num["failures"] + num["errors"]
            tally.passed += num["tests"] - num["failures"] - num["errors"] - num["skipped"]
            tally.skipped += num["skipped"]
    tally.failed += max(failed, status not in {0, NOTHING_SELECTED})


def _wait(pytest: subprocess.Popen[bytes], until_s: float) -> int:
    """Its exit status. Out of time, it is interrupted: so it ends the servers it started and says what has failed so far."""
    try:
        return pytest.wait(max(0.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"FAILED  the tests did not finish within {TESTS_TIMEOUT_S} s", flush=True)
        pytest.send_signal(signal.SIGINT)
    try:
        pytest.wait(CLEAN_UP_S)
    except subprocess.TimeoutExpired:
        pytest.kill()
    return -1


def main() -> int:
    """Run what was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description="Run every check and test.")
    parser.add_argument("--quick", action="store_true", help="unit tests only: no kernels, golden, e2e")
    options, extra = parser.parse_known_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
    os.chdir(ROOT)
    os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    began_s = time.monotonic()
    parts, computing = (QUICK, QUICK_COMPUTING) if options.quick else (ALL, COMPUTING)
    tally, skipped, tests = Tally(), [], Tally()
    with tempfile.TemporaryDirectory(prefix="jdisagg-checks-") as directory:
        keep_compiled(Path(directory))
        generated = Path(directory) / "generated"
        generated.mkdir()
        with beside(computing, extra, tests):
            for check in checks(generated):
                run_check(check, tally, skipped)
            for part in parts:
                run_tests(part, extra, tests)
        if not options.quick:
            run_tests(LAST, extra, tests)
    if not tests.all():
        print(f"FAILED  no test matches {' '.join(extra)}", flush=True)
        tests.failed += 1
    tally.add(tests)
    for line in skipped:
        print(f"SKIPPED  {line}")
    print(tally.line(time.monotonic() - began_s))
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
