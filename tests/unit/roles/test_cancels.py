"""Who may cancel a request, how its end is counted then, and what all are told when the engine cannot go on."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest

from jdisagg.core.errors import Unavailable
from jdisagg.core.requests import FinishReason, Output
from jdisagg.handoff.events import PeerAlive
from jdisagg.handoff.messages import HandoffId
from jdisagg.roles.inbox import Call, Cancel, Message, Submit
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


def broken() -> None:
    """A call that the engine does not survive."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("during_a_step", [False, True])
def test_when_the_engine_cannot_go_on_those_it_has_not_looked_at_are_told_as_well(during_a_step: bool) -> None:
    unified = Unified()
    loop, inbox = unified.engine.loop, unified.engine.inbox
    assert loop is not None

    def come() -> None:
        for attempt, name in enumerate(("before", "behind")):
            unified.submit(replace(request(name, (1, 2, 3), 20), attempt=attempt))
            if name == "before":  # a unified engine has no peers
                inbox.post(PeerAlive(HandoffId("x", 1)) if during_a_step else Call(broken, Future()))

    unified.submit(request("runs", tuple(range(1, 31)), 9))
    unified.tick()
    if during_a_step:
        unified.engine.runner.meanwhile = come
    else:
        come()
    with pytest.raises(AssertionError if during_a_step else KeyboardInterrupt):
        unified.tick()
    unified.submit(replace(request("late", (1, 2, 3), 20), attempt=2))
    for _ in range(2):
        loop.fail_all(Unavailable("the engine stopped"))
    ends = [(output.request_id, output.attempt) for output in unified.outputs if isinstance(output.error, Unavailable)]
    assert sorted(ends) == [("before", 0), ("behind", 1), ("late", 2), ("runs", 0)], "each once, by its own attempt"


def test_an_engine_that_cannot_go_on_waits_for_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    unified, waits_s = Unified(), list[float]()
    loop = unified.engine.loop
    assert loop is not None

    def drain(wait_s: float) -> list[Message]:
        waits_s.append(wait_s)
        return []

    monkeypatch.setattr(unified.engine.inbox, "drain", drain)
    loop.fail_all(Unavailable("the engine stopped"))
    assert waits_s == [0.0]


def test_a_request_that_the_engine_breaks_on_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    unified = Unified()
    loop = unified.engine.loop
    assert loop is not None
    monkeypatch.setattr(unified.engine.scheduler, "add", breaks)
    unified.submit(request("a", (1, 2, 3), 20))
    with pytest.raises(RuntimeError):
        unified.tick()
    loop.fail_all(Unavailable("the engine stopped"))
    assert [(output.request_id, output.finish) for output in unified.outputs] == [("a", FinishReason.ERROR)]
