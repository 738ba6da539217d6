"""How busy a worker says it is."""

from __future__ import annotations

import pytest

from jdisagg.core.fleet import Load
from jdisagg.roles import engine_loop
from tests.unit.roles.world import World
from tests.unit.sched.engine_fake import request

LONG = 36  # tokens; a step computes 12


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "IDLE_WAIT_S", 0.0)


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
