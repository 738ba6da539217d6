"""What a kernel refuses is left out by name; what it fails at fails the section, as does an implementation that refuses all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_kit import kernel_section, offers
from gpu_kit.findings import Clock, Findings, Skipped
from gpu_kit.setting import Setting

from pallas_kernels.implementation import Refused


def raises(error: Exception) -> Any:
    raise error


def test_only_a_refusal_is_left_out() -> None:
    assert offers.unless_refused(abs, -2) == 2
    with pytest.raises(Skipped, match="head dim 80"):
        offers.unless_refused(raises, Refused("head dim 80"))
    with pytest.raises(ValueError, match="lowering"):
        offers.unless_refused(raises, ValueError("lowering failed"))


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (Skipped("head dim 80"), {"ref takes some case of attention"}),
        (ValueError("lowering failed"), {"ref takes some case of attention", f"ref, {kernel_section.CASES[0].name}"}),
    ],
)
def test_an_implementation_that_takes_no_case_fails_the_section(
    error: Exception, wrong: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_write", "_pages", "_tokens", "_noise"):
        monkeypatch.setattr(kernel_section, name, lambda *_: None)
    monkeypatch.setattr(kernel_section, "CASES", kernel_section.CASES[:1])
    monkeypatch.setattr(offers, "attend", lambda *_, **__: raises(error))
    setting = Setting(name="s", out=tmp_path, scratch=tmp_path, small=True, clock=Clock(60.0))
    kernel_section.run(setting, Findings(tmp_path / "f.json"))
    checks = json.loads((tmp_path / "f.json").read_text())["checks"]
    assert {check["name"] for check in checks if not check["holds"]} == wrong
