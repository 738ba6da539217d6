"""Which `traceparent` values are carried along: those the W3C standard calls valid."""

from __future__ import annotations

import pytest

from jdisagg.core.trace import read_traceparent

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("value", [GOOD, GOOD[:-2] + "00", "cc" + GOOD[2:], "cc" + GOOD[2:] + "-what-later-versions.add"])
def test_valid_values_pass_unchanged(value: str) -> None:
    assert read_traceparent(value) == value
    assert read_traceparent(f" {value} ") == value


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "nonsense",
        GOOD + "-more",  # version 00 has four fields
        "ff" + GOOD[2:],
        GOOD.upper(),
        GOOD.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        GOOD.replace("b7ad6b7169203331", "0" * 16),
        GOOD[:-1],
        "cc" + GOOD[2:] + "-a\nforged log line",
        "cc" + GOOD[2:] + "-" + "x" * 300,
    ],
)
def test_others_are_ignored(value: str | None) -> None:
    assert read_traceparent(value) == ""
