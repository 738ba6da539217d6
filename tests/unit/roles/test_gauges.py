"""Gauges of a process that holds a prefill and a decode engine (colocated)."""

from __future__ import annotations

import pytest

from jdisagg.core.metrics import Metrics
from jdisagg.roles import engine_loop
from tests.unit.roles.world import World
from tests.unit.sched.engine_fake import request


def test_what_two_engines_publish_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Metrics()
    monkeypatch.setattr("tests.unit.roles.engine.Metrics", lambda: shared)
    monkeypatch.setattr(engine_loop, "IDLE_WAIT_S", 0.0)
    world, shown = World(local_prefill=False), list[tuple[float, float]]()
    world.submit(request("r", tuple(range(3, 22)), 6))
    while not shown or not world.outputs["r"] or world.outputs["r"][-1].finish is None:
        world.tick()
        shown.append((shared.transfer.leases._value.get(), shared.transfer.published_bytes._value.get()))
    leases, published_bytes = map(max, zip(*shown, strict=True))
    assert leases == 1
    assert published_bytes > 0
    world.settle()
    for _ in range(2):
        world.tick()
    assert (shared.transfer.leases._value.get(), shared.transfer.published_bytes._value.get()) == (0, 0)
