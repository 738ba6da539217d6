"""The report of checks and tests: one that breaks does not end it, each test runs once, and what only computes makes way."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import checks
import pytest
from checks import ALL, COMPUTING, LAST, QUICK, QUICK_COMPUTING, ROOT, Part, Tally

# What a test run does here, by the path that it is given; it reports four tests, of which one has passed.
PYTEST = """
import os, sys, time

path, report = sys.argv[1], next(word.partition("=")[2] for word in sys.argv if word.startswith("--junit-xml="))
if path.isdigit():
    sys.exit(int(path))
if path == "hanging":
    time.sleep(60.0)
if path == "computing":
    until_s = time.monotonic() + 10.0
    while not os.path.exists("block") and time.monotonic() < until_s:
        time.sleep(0.01)
policy = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else 0
os.write(1, b"%s \\xff under %d\\n" % (path.encode(), policy))
open(f"{path} has ended", "w").close()
with open(report, "w") as file:
    file.write('<testsuites><testsuite tests="4" failures="1" errors="1" skipped="1"/></testsuites>')
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """Tests are those of `PYTEST`; returns what tells what was printed since, line by line."""
    (tmp_path / "fake.py").write_text(PYTEST)
    (tmp_path / "pytest").write_text(f"#!/bin/sh\nexec '{sys.executable}' -S '{tmp_path}/fake.py' \"$@\"\n")
    (tmp_path / "pytest").chmod(0o755)
    monkeypatch.setattr(checks, "BIN", tmp_path)
    monkeypatch.chdir(tmp_path)
    return lambda: capfd.readouterr().out.split("\n")


def test_metrics_that_cannot_be_made_are_a_failed_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    promtool = tmp_path / "promtool"
    promtool.write_text("#!/bin/sh\ncat\n")  # content with everything
    promtool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(checks, "METRICS_TEXT", "raise SystemExit(3)")
    (check,) = (one for one in checks.checks(tmp_path) if one.name == "metrics (promtool)")
    tally = Tally()
    checks.run_check(check, tally, [])
    assert (tally.passed, tally.failed) == (0, 1)


@pytest.mark.parametrize(
    ("parts", "roots"),
    [((*QUICK, QUICK_COMPUTING), ("tests/unit", "tests/compat")), ((*ALL, COMPUTING, LAST), ("tests",))],
)
def test_each_file_of_tests_runs_in_one_part(parts: tuple[Part, ...], roots: tuple[str, ...]) -> None:
    def files(paths: tuple[str, ...]) -> Counter[Path]:
        return Counter(file for path in paths for file in (ROOT / path).rglob("test_*.py"))

    found = Counter[Path]()
    for part in parts:
        assert all((ROOT / path).is_dir() for path in (*part.paths, *part.ignored))
        found += files(part.paths) - files(part.ignored)
    assert found == files(roots)


@pytest.mark.skipif(checks.IDLE is None, reason="nothing makes way here")
def test_what_only_computes_runs_beside_the_rest_with_the_time_that_it_leaves_and_is_shown_behind_it(
    ran: Callable[[], list[str]],
) -> None:
    tally, ours = Tally(), os.sched_getscheduler(0)
    with checks.beside(Part(("computing",)), [], tally):
        checks.run_tests(Part(("judging",)), [], tally)
        assert tally.all() == 4
        Path("block").touch()
    assert ran()[:2] == [f"judging \ufffd under {ours}", f"computing \ufffd under {os.SCHED_IDLE}"]
    assert tally == Tally(passed=2, failed=4, skipped=2)


def test_where_nothing_makes_way_it_runs_before_the_rest(monkeypatch: pytest.MonkeyPatch, ran: Callable[[], list[str]]) -> None:
    monkeypatch.setattr(checks, "IDLE", None)
    Path("block").touch()
    with checks.beside(Part(("computing",)), [], tally := Tally()):
        assert Path("computing has ended").exists()
        print("the rest")
    assert ran()[0] == "the rest"
    assert tally.all() == 4


def test_what_ran_beside_an_interrupted_run_is_shown(ran: Callable[[], list[str]]) -> None:
    Path("block").touch()
    with pytest.raises(KeyboardInterrupt), checks.beside(Part(("computing",)), [], tally := Tally()):
        raise KeyboardInterrupt
    assert ran()[0].startswith("computing ")
    assert not tally.all()


@pytest.mark.parametrize(("status", "failed"), [(0, 0), (checks.NOTHING_SELECTED, 0), (2, 1)])
def test_a_run_that_broke_off_without_a_report_has_failed(status: int, failed: int, ran: Callable[[], list[str]]) -> None:
    checks.run_tests(Part((str(status),)), [], tally := Tally())
    assert tally == Tally(failed=failed)
    assert ran() == [""]


def test_a_run_that_takes_too_long_is_interrupted_and_has_failed(
    monkeypatch: pytest.MonkeyPatch, ran: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(checks, "TESTS_TIMEOUT_S", 0)
    checks.run_tests(Part(("hanging",)), [], tally := Tally())
    assert ran()[0] == "FAILED  the tests did not finish within 0 s"
    assert tally == Tally(failed=1)
