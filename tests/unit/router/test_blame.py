"""What befell a worker, and whether the requests that it had are to blame."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.api.worker.client import CLOSED, SILENT, STALLED
from jdisagg.core.errors import HandoffLost
from jdisagg.router.blame import Blame, Lost
from jdisagg.router.entry import Entry
from jdisagg.router.worker_news import EVICTED
from tests.unit.router.test_late_registrations import MEMBER


@pytest.mark.parametrize(
    ("reason", "draining", "death"),
    [(CLOSED, False, False), (CLOSED, True, False), ("reset", True, False), ("reset", False, True), (SILENT, False, True)],
)
def test_a_worker_died_unless_it_was_about_to_end_or_closed_the_stream_itself(reason: str, draining: bool, death: bool) -> None:
    entry = Entry(replace(MEMBER, draining=draining), 0.0)
    lost = Lost.of(entry, reason)
    assert (lost.death, lost.worker, lost.reason) == (death, entry.key if death else None, reason)
    assert isinstance(lost.error, HandoffLost)
    assert entry.member.worker in lost.error.message
    assert reason in lost.error.message


@pytest.mark.parametrize(("reason", "deaths"), [("reset", 1.0), (SILENT, 0.5), (EVICTED, 0.5), (STALLED, 1.0)])
def test_a_worker_that_is_back_did_not_die_of_a_request_unless_its_engine_stood_still(reason: str, deaths: float) -> None:
    blame, entry = Blame(), Entry(MEMBER, 0.0)
    blame.add(Lost.of(entry, reason))
    assert blame.deaths == deaths
    blame.clear(("another", "worker"))
    assert blame.deaths == deaths
    blame.clear(entry.key)
    assert blame.deaths == (1.0 if reason == STALLED else 0.0)


def test_a_worker_that_closed_its_stream_and_one_that_gave_the_request_back_speak_against_nobody() -> None:
    blame = Blame()
    blame.add(Lost.of(Entry(MEMBER, 0.0), CLOSED))
    blame.add(Lost(HandoffLost("every rung failed"), death=False))
    assert blame.deaths == 0
