"""What a router makes of each of its workers, in a word that operators read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.fleet import SUSPECT_S, Standing, State
from jdisagg.core.requests import Role
from jdisagg.router.entry import Entry, RunStream
from tests.unit.router.test_late_registrations import MEMBER

NOW_S = 10.0


def worker(role: Role = Role.DECODE, *, linked: bool = True, **says: object) -> Entry:
    entry = Entry(replace(MEMBER, role=role, **says), NOW_S)
    if linked and role is not Role.PREFILL:
        entry.stream = RunStream(NOW_S, NOW_S)
    return entry


@pytest.mark.parametrize("role", [Role.DECODE, Role.UNIFIED, Role.PREFILL])
def test_a_worker_that_nothing_is_the_matter_with_serves(role: Role) -> None:
    entry = worker(role)
    entry.pending = 3
    assert entry.standing(NOW_S) == Standing(State.SERVING, "", 3)


def test_a_worker_that_decodes_is_connecting_until_its_stream_stands_and_unreached_once_that_is_known() -> None:
    entry = worker(linked=False)
    assert entry.standing(NOW_S) == Standing(State.CONNECTING, "", 0)
    entry.why_unreached = "UNAVAILABLE: refused"
    assert entry.standing(NOW_S) == Standing(State.UNREACHED, "UNAVAILABLE: refused", 0)


def test_a_worker_whose_stream_says_nothing_is_silent_whatever_it_said_last() -> None:
    entry = worker(not_ready="no prefill worker is reached")
    assert entry.stream is not None
    entry.stream.quiet_s = NOW_S
    assert entry.standing(NOW_S).state is State.SILENT


def test_a_worker_that_says_it_is_not_ready_is_not_and_says_why() -> None:
    assert worker(not_ready="no prefill worker").standing(NOW_S) == Standing(State.NOT_READY, "no prefill worker", 0)


def test_a_worker_that_failed_is_suspect_for_a_while() -> None:
    entry = worker()
    entry.suspect_until_s = NOW_S + SUSPECT_S
    assert entry.standing(NOW_S).state is State.SUSPECT
    assert entry.standing(NOW_S + SUSPECT_S).state is State.SERVING


@pytest.mark.parametrize("linked", [True, False])
def test_a_worker_that_is_about_to_end_is_draining_whatever_else_is_the_matter(linked: bool) -> None:
    entry = worker(linked=linked, draining=True, not_ready="no prefill worker")
    entry.why_unreached = "UNAVAILABLE"
    assert entry.standing(NOW_S) == Standing(State.DRAINING, "", 0)
