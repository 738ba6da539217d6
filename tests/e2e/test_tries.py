"""What is tried again, and what the log tells of it."""

from __future__ import annotations

import pytest

from tests.e2e.tries import fair


def test_a_spoilt_try_is_told_and_not_counted_and_the_last_one_counts_whatever_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fair(lambda number: number, lambda number: number < 2, "it sleeps") == 2
    assert capsys.readouterr().out == "try 1 of 3 is not counted: True; it sleeps\n"
    asked: list[int] = []
    assert fair(lambda number: number, lambda number: asked.append(number) or f"bad {number}", "it sleeps", tries=2) == 2
    assert asked == [1], "who asserts on the last one says what is wrong"
    assert capsys.readouterr().out == "try 1 of 2 is not counted: bad 1; it sleeps\n"
