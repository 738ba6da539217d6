"""Who may cancel a request, how its end is counted then, and what all are told when the engine cannot go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.errors import Unavailable
from jdisagg.core.requests import FinishReason, Output
from jdisagg.roles.inbox import Cancel, Submit
from tests.unit.roles.measured import Unified, read
from tests.unit.sched.engine_fake import request

pytestmark = pytest.mark.usefixtures("no_sleep")


def test_a_cancel_ends_only_what_its_own_front_end_has_asked_for() -> None:
    unified, mine, others = Unified(), list[Output](), list[Output]()
    take = mine.extend
    unified.engine.inbox.post(Submit(request("a", (1, 2, 3), 20), take))
    unified.tick()
    for name, sink in (("a", others.extend), ("unknown", take)):
        unified.engine.inbox.post(Cancel(name, 0, sink=sink))
        unified.tick()
    assert list(unified.requests()) == ["a"], "one with the same id may be another one's"
    unified.engine.inbox.post(Cancel("a", 0, sink=take))
    unified.tick()
    assert list(unified.requests()) == []
    unified.run()


@pytest.mark.parametrize(("enough", "reason"), [(True, "stop"), (False, "abort")])
def test_a_client_that_has_enough_was_answered_and_one_that_leaves_was_not(enough: bool, reason: str) -> None:
    unified = Unified()
    unified.submit(request("a", (1, 2, 3), 20))
    unified.tick()
    unified.engine.inbox.post(Cancel("a", 0, enough=enough))
    unified.run()
    assert read(unified.engine.metrics, "requests_finished_total", reason=reason) == 1


def test_when_the_engine_cannot_go_on_each_client_is_told_once() -> None:
    unified, error = Unified(), Unavailable("the engine stopped")
    for attempt, name in enumerate("ab"):
        unified.submit(replace(request(name, (1, 2, 3), 20), attempt=attempt))
    unified.tick()
    loop = unified.engine.loop
    assert loop is not None
    for _ in range(2):
        loop.fail_all(error)
    told = [
        Output(request_id=name, attempt=attempt, finish=FinishReason.ERROR, error=error) for attempt, name in enumerate("ab")
    ]
    assert [output for output in unified.outputs if output.finish] == told
