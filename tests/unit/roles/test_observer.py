"""How often a prefill worker looks through its queue for the tokens that it has to compute."""

from __future__ import annotations

import pytest

from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.roles.observer import SEQUENCES_PER_TICK, TickObserver
from jdisagg.roles.pipeline import Turn
from tests.unit.roles.engine import Engine
from tests.unit.sched.engine_fake import request


@pytest.mark.parametrize(
    ("waiting", "running", "period"),
    [
        (SEQUENCES_PER_TICK - 1, 0, 1),
        (SEQUENCES_PER_TICK, 0, 2),
        (SEQUENCES_PER_TICK - 100, 100, 2),
        (2 * SEQUENCES_PER_TICK, SEQUENCES_PER_TICK - 1, 3),
        (SEQUENCES_PER_TICK, 3 * SEQUENCES_PER_TICK, 5),
    ],
)
def test_the_more_sequences_there_are_the_more_ticks_go_by_without_a_look_at_them(
    waiting: int, running: int, period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, told = Engine(Role.PREFILL, 99, True), list[int]()
    scheduler = engine.scheduler
    counts = scheduler.counts() | {"waiting": waiting, "running": running}
    monkeypatch.setattr(scheduler, "counts", lambda: counts)
    observer = TickObserver(scheduler, Metrics(), Role.PREFILL)
    for tick in range(1, 16):
        scheduler.add(request(f"r{tick}", (1,), 1), 0.0)
        observer.observe(Turn(None, [], 0.0, 0.0), waiting + running, 0.0)
        told.append(observer.load.pending_prefill_tokens)
    assert told == [tick // period * period for tick in range(1, 16)]
