"""How busy a worker says it is."""

from __future__ import annotations

import pytest

from jdisagg.core.fleet import Load
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.roles.observer import TickObserver
from jdisagg.roles.pipeline import Turn
from jdisagg.sched.scheduler import Scheduler
from tests.unit.roles.engine import Engine
from tests.unit.roles.world import World
from tests.unit.sched.engine_fake import request

LONG = 36  # tokens; a step computes 12

pytestmark = pytest.mark.usefixtures("no_sleep")


def load_of_prefill(world: World) -> Load:
    assert world.prefill.loop is not None
    return world.prefill.loop.load


def test_a_prefill_worker_tells_of_prompts_that_wait_and_of_tokens_that_are_not_computed() -> None:
    """Routers ask the one with the least of them, whoever sent it the others."""
    world, told = World(local_prefill=False, prefill_pages=14), list[Load]()
    for name in "abc":
        world.submit(request(name, tuple(range(3, 3 + LONG)), 2))
    for _ in range(20):
        world.tick()
        told.append(load_of_prefill(world))
    assert max(load.running + load.waiting for load in told) == 3
    assert max(load.pending_prefill_tokens for load in told) == 3 * LONG - 12
    first = next(index for index, load in enumerate(told) if load.pending_prefill_tokens)
    assert told[first + 1].pending_prefill_tokens == told[first].pending_prefill_tokens - 12
    world.settle()
    assert (load_of_prefill(world).waiting, load_of_prefill(world).pending_prefill_tokens) == (0, 0)


def test_of_thousands_that_wait_a_tick_looks_at_a_few_hundred_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long queue must not make every step of its worker later."""
    engine = Engine(Role.PREFILL, 99, True)
    observer, looked_at = TickObserver(engine.scheduler, Metrics(), Role.PREFILL), list[int]()
    pending = Scheduler.pending_prefill_tokens.fget
    assert pending is not None

    def counted(scheduler: Scheduler) -> int:
        looked_at.append(sum(scheduler.counts().values()))
        return pending(scheduler)

    monkeypatch.setattr(Scheduler, "pending_prefill_tokens", property(counted))
    for number in range(2000):
        engine.scheduler.add(request(f"r{number}", (1, 2, 3), 1), 0.0)
    turn = Turn(None, [], 0.0, 0.0)
    for _ in range(100):
        observer.observe(turn, 2000, 0.0)
    assert observer.load.pending_prefill_tokens == 2000 * 3
    assert sum(looked_at) <= 100 * 300
    for number in range(1999):
        engine.scheduler.cancel(f"r{number}")
    observer.observe(turn, 1, 0.0)
    assert observer.load.pending_prefill_tokens == 3, "of few every tick knows"
