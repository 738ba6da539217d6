"""Lines of the log that anybody can cause."""

from __future__ import annotations

import logging

import pytest

from jdisagg.core.logs import Seldom

log = logging.getLogger(__name__)


def test_one_line_in_a_while_is_said_with_how_many_were_kept_back(caplog: pytest.LogCaptureFixture) -> None:
    seldom = Seldom(10.0)
    for now_s in (100.0, 101.0, 109.9, 110.0, 119.0, 135.0, 145.0):
        seldom.say(log, logging.WARNING, "%s is here", f"x{now_s:g}", now_s=now_s)
    assert caplog.messages == [
        "x100 is here",
        "x110 is here; 2 more since it was last said",
        "x135 is here; 1 more since it was last said",
        "x145 is here",
    ]


def test_the_first_lines_of_a_while_are_all_said_when_so_many_are_wanted(caplog: pytest.LogCaptureFixture) -> None:
    seldom = Seldom(10.0, first=2)
    for now_s in (100.0, 101.0, 102.0, 109.9, 110.0, 110.0, 119.0, 135.0):
        seldom.say(log, logging.WARNING, "x%g", now_s, now_s=now_s)
    assert caplog.messages == [
        "x100",
        "x101",
        "x110; 2 more since it was last said",
        "x110",
        "x135; 1 more since it was last said",
    ]
