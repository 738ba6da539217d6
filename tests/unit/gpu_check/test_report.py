"""Targets say met, missed or not run; the page shows them beside what was wanted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu_kit.findings import Findings, Target
from gpu_kit.report import make_report, markdown, shown
from gpu_kit.runner import Result


def found(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "f.json").read_text())


@pytest.mark.parametrize(
    ("got", "at_least", "verdict"),
    [(0.75, True, "met"), (0.74, True, "missed"), (0.76, False, "missed"), (0.75, False, "met"), (None, True, "not run")],
)
def test_a_target_is_judged(tmp_path: Path, got: float | None, at_least: bool, verdict: str) -> None:
    share = Target(name="share", wanted=0.75, unit="of it", at_least=at_least)
    Findings(tmp_path / "f.json").target(share, got, "no device")
    (target,) = found(tmp_path)["targets"]
    assert target["verdict"] == verdict


def test_the_page_has_targets_tables_and_what_was_left_out(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "f.json")
    findings.target(Target(name="speed", wanted=3.0, unit="times"), 1.5)
    findings.target(Target(name="rate", wanted=5.0, unit="GB/s"), None, "the backend failed")
    findings.row("steps", batch=1, ms=2.5)
    findings.row("steps", batch=8, ms=3.5, extra="a|b")
    findings.left_out("theirs", "not installed: torch")
    result = Result("batch", "pass", found=found(tmp_path))
    page = markdown(make_report([result], small=False))
    assert "| batch | speed | 1.5 times | at least 3 times | missed |" in page
    assert "| batch | rate | the backend failed | at least 5 GB/s | not run |" in page
    assert "| batch | ms | extra |\n| --- | --- | --- |\n| 1 | 2.5 |  |\n| 8 | 3.5 | a/b |" in page
    assert "- left out: theirs: not installed: torch" in page


def test_figures_are_shown_as_people_read_them() -> None:
    assert [shown(value) for value in (1234.5, 0.123456, 10_000, 12, True, None)] == [
        "1,234",
        "0.1235",
        "10,000",
        "12",
        "True",
        "None",
    ]
