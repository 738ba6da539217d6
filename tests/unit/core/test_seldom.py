"""Lines of the log that anybody can cause."""

from __future__ import annotations

import logging

import pytest

from jdisagg.core.logs import BUG_FIRST, HTTP_BUG, HTTP_SERVER_LOG, HttpBugs, Seldom

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


def test_a_line_has_the_stack_of_its_error(caplog: pytest.LogCaptureFixture) -> None:
    seldom = Seldom(10.0)
    for now_s in (100.0, 101.0, 110.0):
        seldom.say(log, logging.ERROR, "x", now_s=now_s, error=OverflowError(f"at {now_s:g}"))
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["at 100", "at 110"]


def test_stacks_of_calls_over_http_are_told_seldom(caplog: pytest.LogCaptureFixture) -> None:
    server_log, seldom = logging.getLogger(HTTP_SERVER_LOG), HttpBugs()
    server_log.addFilter(seldom)
    try:
        for number in range(2 * BUG_FIRST):
            server_log.error(HTTP_BUG, exc_info=OverflowError(f"bug {number}"))
        server_log.error("something else")
    finally:
        server_log.removeFilter(seldom)
    assert caplog.messages == ["a call over HTTP failed"] * BUG_FIRST + ["something else"]
    assert caplog.records[0].exc_info is not None
    assert "bug 0" in caplog.text
