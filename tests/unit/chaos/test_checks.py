"""The report of every check: one that breaks does not end it."""

from __future__ import annotations

from pathlib import Path

import checks
import pytest


def test_metrics_that_cannot_be_made_are_a_failed_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    promtool = tmp_path / "promtool"
    promtool.write_text("#!/bin/sh\ncat\n")  # content with everything
    promtool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(checks, "METRICS_TEXT", "raise SystemExit(3)")
    (check,) = (one for one in checks.checks(tmp_path) if one.name == "metrics (promtool)")
    tally = checks.Tally()
    checks.run_check(check, tally, [])
    assert (tally.passed, tally.failed) == (0, 1)
