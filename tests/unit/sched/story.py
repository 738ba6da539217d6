"""Runs of 4 ms a step, and the story that their log tells of one request."""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.sched.engine_fake import FakeEngine

TICK_S = 0.004
Tell = Callable[..., list[str]]


def finish(engine: FakeEngine) -> None:
    """To the end, 4 ms a tick."""
    while not (engine.scheduler.is_idle() and not engine.in_flight):
        engine.tick()
        engine.now_s += TICK_S
        assert engine.now_s < 10, "it does not end"
