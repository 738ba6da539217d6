"""The invariants that every tick of the tests asserts: each damage is noticed, and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jdisagg.sched.states import Status
from jdisagg.sched.table import SequenceTable
from tests.unit.sched.engine_fake import FakeEngine, request
from tests.unit.sched.test_sequence import sequence


def _two_in_one_slot(table: SequenceTable) -> None:
    table.live["b"].slot = table.live["a"].slot


def _no_slot(table: SequenceTable) -> None:
    table.live["b"].slot = None


def _slot_lost(table: SequenceTable) -> None:
    table.slots.take()


def _kept_for_nobody(table: SequenceTable) -> None:
    assert table.host.keep(sequence(), 5)


def _in_no_queue(table: SequenceTable) -> None:
    table.queues[Status.WAITING].remove(table.live["c"])


def _in_two_queues(table: SequenceTable) -> None:
    table.queues[Status.READY].add(table.live["c"])


def _page_lost(table: SequenceTable) -> None:
    table.live["a"].holding.pages.pop()


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (_two_in_one_slot, "slots and running sequences do not match"),
        (_no_slot, "slots and running sequences do not match"),
        (_slot_lost, "a slot is lost"),
        (_kept_for_nobody, "5 tokens on the host, 0 of live sequences"),
        (_in_no_queue, "a sequence is in no queue or in two"),
        (_in_two_queues, "a sequence is in no queue or in two"),
        (_page_lost, "3 pages used, 2 held by sequences"),
    ],
)
def test_the_check_names_what_does_not_add_up(damage: Callable[[SequenceTable], None], finding: str) -> None:
    engine = FakeEngine(host_tokens=50)
    engine.add(request("a", (1, 2, 3, 4, 5)), request("b", (6, 7)))
    engine.step()
    engine.add(request("c", (1,)))
    engine.scheduler.check()
    damage(engine.scheduler.table)
    with pytest.raises(AssertionError, match=f"^{finding}"):
        engine.scheduler.check()


def test_calls_in_the_wrong_order_are_named() -> None:
    engine = FakeEngine()
    engine.add(request("a", (1, 2)))
    scheduler = engine.scheduler
    with pytest.raises(AssertionError, match=r"^request a: waiting -> ready; allowed: \['finished', 'prealloc', 'running'\]"):
        scheduler.table.move(scheduler.table.live["a"], Status.READY)
