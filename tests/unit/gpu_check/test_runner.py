"""Sections are processes: what hangs, raises or lacks something ends alone, and keeps what it had found."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from bench_kit.machine import commit
from gpu_check import allowed, parse
from gpu_kit import runner
from gpu_kit.findings import Target
from gpu_kit.runner import Budget, lacking, run_section
from gpu_kit.sections import LEAST_VERSIONS, SECTIONS, TOTAL_S, Section, picked
from gpu_kit.setting import FULL, SMALL

from tests.unit.waiting import until

BODIES = {
    "fine": "findings.fact(answer=42); findings.check('two is two', True)",
    "wrong": "findings.check('one is two', False, 'it is not'); findings.fact(after=1)",
    "raising": "findings.fact(before=1); raise RuntimeError('broken on purpose')",
    "hanging": "findings.fact(before=1); time.sleep(600)",
    "dying": "findings.fact(before=1); os.abort()",
    "unable": "raise Skipped('nothing to look at')",
    "leaving": "findings.fact(left=subprocess.Popen(['sleep', '600']).pid)",
    "halfway": "findings.target(Target(name='first', wanted=1.0, unit='s'), 2.0); os.abort()",
    "parts": "findings.attempt('first', lambda: 1 / 0); findings.fact(second=2)",
}
CLOSE_S = 15.0  # of 560, for imports before the first section and the kill of the last
HEAD = "import os, subprocess, time\nfrom gpu_kit.findings import Skipped, Target\n\n\ndef run(setting, findings):\n    "


TARGETS = (Target(name="first", wanted=1.0, unit="s"), Target(name="second", wanted=2.0, unit="s"))


def verdicts(result: runner.Result) -> list[tuple[str, str, str]]:
    return [(line["name"], line["verdict"], line["why"]) for line in result.found["targets"]]


def is_running(pid: int) -> bool:
    """Neither gone nor waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, body in BODIES.items():
        (tmp_path / f"section_{name}.py").write_text(HEAD + body + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(runner, "LEAST_S", 0.5)


def run(name: str, tmp_path: Path, *, budget_s: float = 50.0, needs: tuple[str, ...] = ()) -> runner.Result:
    section = Section(name=name, module=f"section_{name}", says="", budget_s=budget_s, needs=needs, targets=TARGETS)
    return run_section(section, tmp_path / "out", tmp_path, Budget(100.0), small=True)


def test_a_section_that_holds_passes_with_its_facts(tmp_path: Path) -> None:
    result = run("fine", tmp_path)
    assert (result.status, result.reason) == ("pass", "")
    assert result.found["facts"] == {"answer": 42}


def test_a_check_that_does_not_hold_fails_the_section_by_name(tmp_path: Path) -> None:
    result = run("wrong", tmp_path)
    assert (result.status, result.reason) == ("fail", "does not hold: one is two")
    assert result.found["facts"] == {"after": 1}


@pytest.mark.parametrize(("name", "said"), [("raising", "broken on purpose"), ("dying", "exit status -6")])
def test_a_section_that_ends_badly_fails_and_keeps_what_it_found(tmp_path: Path, name: str, said: str) -> None:
    result = run(name, tmp_path)
    assert result.status == "fail"
    assert said in result.reason
    assert result.found["facts"] == {"before": 1}


@pytest.mark.timeout(240)
def test_a_section_that_hangs_is_killed_at_its_limit_and_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SAVED_S", 0.0)
    body = (tmp_path / "section_hanging.py").read_text()
    marker = tmp_path / "pid"
    (tmp_path / "section_hanging.py").write_text(
        body.replace("time.sleep", f"open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep")
    )

    class Begun(subprocess.Popen[bytes]):
        """Its time runs once it has begun: a busy machine may take longer to start it."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                until(marker.exists, limit_s=120.0)
            return super().wait(timeout)

    monkeypatch.setattr(runner.subprocess, "Popen", Begun)
    result = run("hanging", tmp_path, budget_s=2.0)
    assert (result.status, result.found["facts"]) == ("fail", {"before": 1})
    assert result.reason.startswith("out of time")
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_what_a_section_leaves_running_ends_with_it(tmp_path: Path) -> None:
    result = run("leaving", tmp_path)
    assert result.status == "pass"
    until(lambda: not is_running(result.found["facts"]["left"]))


def test_each_target_of_a_section_that_dies_has_a_line(tmp_path: Path) -> None:
    first, second = verdicts(run("halfway", tmp_path))
    assert first == ("first", "met", "")
    assert second[:2] == ("second", "not run")
    assert second[2].startswith("exit status -6")


def test_the_targets_of_a_section_that_was_not_started_say_why(tmp_path: Path) -> None:
    why = "not installed: no_such_module"
    assert verdicts(run("fine", tmp_path, needs=("no_such_module",))) == [("first", "not run", why), ("second", "not run", why)]


def test_a_part_that_raises_fails_the_section_but_not_the_next_part(tmp_path: Path) -> None:
    result = run("parts", tmp_path)
    assert result.status == "fail"
    assert result.found["facts"] == {"second": 2}
    assert "ZeroDivisionError" in result.found["checks"][0]["detail"]


def test_a_section_that_cannot_run_here_is_skipped_with_its_reason(tmp_path: Path) -> None:
    result = run("unable", tmp_path)
    assert (result.status, result.reason) == ("skip", "nothing to look at")


def test_what_is_not_installed_is_named_and_nothing_is_started(tmp_path: Path) -> None:
    result = run("fine", tmp_path, needs=("json", "no_such_module", "no.such.package"))
    assert (result.status, result.reason) == ("skip", "not installed: no_such_module, no.such.package")
    assert not (tmp_path / "out").exists()


def test_what_one_section_saves_later_ones_may_use() -> None:
    budget = Budget(100.0)
    assert budget.limit_s(30.0) == 30.0
    budget.spent(30.0, 10.0)
    assert budget.limit_s(30.0) == 50.0
    budget.spent(30.0, 45.0)
    assert budget.limit_s(30.0) == 35.0
    budget.spent(30.0, 90.0)
    assert budget.limit_s(30.0) == 30.0


def test_a_section_that_hangs_cannot_eat_up_what_all_others_saved() -> None:
    budget = Budget(1000.0)
    budget.spent(300.0, 10.0)
    assert budget.limit_s(30.0) == 60.0


def test_no_section_gets_more_than_is_left_of_all() -> None:
    assert Budget(5.0).limit_s(30.0) <= 5.0


def test_what_sections_need_fits_into_a_run_of_560_s_where_a_tenth_of_their_budgets_is_spare() -> None:
    assert 0.9 * sum(section.budget_s for section in SECTIONS) <= TOTAL_S <= 560 - CLOSE_S


def test_sections_that_all_take_their_time_cost_the_last_one_alone() -> None:
    *_, last = SECTIONS
    assert sum(section.budget_s for section in SECTIONS) - TOTAL_S <= 2 * last.budget_s, "it loses the last ones, no more"


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], (1.0, TOTAL_S)),
        (["--patience", "2"], (2.0, 2 * TOTAL_S)),
        (["--patience", "2", "--total-s", "500"], (2.0, 500.0)),
        (["--allow-cpu", "--patience", "3"], (3.0, 3 * TOTAL_S)),
    ],
)
def test_patience_multiplies_every_budget_and_their_sum_unless_that_is_given(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], wanted: tuple[float, float]
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr("sys.argv", ["gpu_check.py", *flags])
    patience, total_s = allowed(parse())
    assert (patience, total_s) == wanted
    assert Budget(total_s, patience=patience).limit_s(30.0) == 30.0 * patience


def test_a_picked_section_brings_device_and_what_it_compares_with() -> None:
    assert [section.name for section in picked("pair-shm")] == ["device", "unified", "pair-shm"]
    with pytest.raises(ValueError, match="decoed unknown, wanted some of device"):
        picked("decoed")


def test_the_documentation_tells_how_many_streams_there_are() -> None:
    text = (Path(__file__).parents[3] / "docs" / "accelerators.md").read_text()
    assert f": {FULL.num_streams} streams, TTFT" in text
    assert f"kill -9 of P with {FULL.num_killed} streams under way ({SMALL.num_killed} with `--small`)" in text


def test_the_least_versions_are_those_that_the_generated_code_accepts() -> None:
    generated = Path(__file__).parents[3] / "jdisagg" / "v1"
    of_grpc = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", (generated / "peer_pb2_grpc.py").read_text())
    of_protobuf = re.search(r"# Protobuf Python Version: ([\d.]+)", (generated / "peer_pb2.py").read_text())
    assert of_grpc is not None
    assert of_protobuf is not None
    found = {"grpc": of_grpc[1], "google.protobuf": of_protobuf[1]}
    assert {name: ".".join(map(str, version)) for name, version in LEAST_VERSIONS.items()} == found


def test_a_package_that_is_too_old_is_named_with_the_version_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    section = Section(
        name="s", module="m", says="", budget_s=1.0, needs=("grpc", "google.rpc", "google.protobuf", "no_such.thing")
    )
    assert lacking(section) == ["no_such.thing"]
    monkeypatch.setattr("grpc.__version__", "1.85.0")
    assert lacking(section) == ["grpcio>=1.85.1", "no_such.thing"]
    for fine in ("1.85.1", "1.86.0rc1", "2.0"):
        monkeypatch.setattr("grpc.__version__", fine)
        assert lacking(section) == ["no_such.thing"]


def test_a_report_is_written_where_there_is_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit() == "unknown"
