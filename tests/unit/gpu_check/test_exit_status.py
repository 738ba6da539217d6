"""A part is never taken for the whole: what did not run is named last, and in the exit status."""

from __future__ import annotations

import pytest
from gpu_check import judge
from gpu_kit.runner import OVER, Result

FINE, FAILED = Result("kernels", "pass"), Result("decode", "fail")
LACKS = Result("unified", "skip", reason="not installed: llguidance", lacks=("llguidance",))
LATE = Result("aot", "skip", reason=OVER)
UNABLE = Result("aot", "skip", reason="no topology is known for this device")


@pytest.mark.parametrize(
    ("results", "allow_missing", "status"),
    [
        ([FINE, UNABLE], False, 0),
        ([FINE, LACKS], False, 4),
        ([FINE, LACKS], True, 0),
        ([FINE, LATE], True, 4),
        ([FINE, LACKS, FAILED], True, 1),
    ],
)
def test_what_did_not_run_is_in_the_exit_status(results: list[Result], allow_missing: bool, status: int) -> None:
    assert judge(results, allow_missing=allow_missing) == status


def test_what_did_not_run_is_named_with_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    judge([FINE, LACKS, LATE], allow_missing=False)
    assert capsys.readouterr().out.splitlines() == [
        "DID NOT RUN: unified; not installed: llguidance",
        f"DID NOT RUN: aot; {OVER}",
    ]
