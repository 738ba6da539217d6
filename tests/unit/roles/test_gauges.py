"""Gauges of a process that holds a prefill and a decode engine (colocated)."""

from __future__ import annotations

import pytest

from jdisagg.core.metrics import Metrics
from jdisagg.roles import engine_loop
from tests.unit.roles.measured import Unified
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


def test_what_host_memory_holds_is_shown_while_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "IDLE_WAIT_S", 0.0)
    world, shown = World(decode_pages=14, reserved_decode_tokens=0, host_tokens=100), set[tuple[float, int]]()
    for i in range(2):
        world.submit(request(f"r{i}", tuple(range(1 + i, 18 + i)), 14))
    while any(not outputs or outputs[-1].finish is None for outputs in world.outputs.values()):
        world.tick()
        held = world.decode.metrics.registry.get_sample_value("jdisagg_host_kv_held_tokens")
        shown.add((held or 0.0, world.decode.scheduler._table.host.used_tokens))
    assert max(held for held, _ in shown) > 0
    assert all(held == used for held, used in shown)
    world.settle()


def test_pages_states_and_load_of_an_engine_are_those_of_its_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "IDLE_WAIT_S", 0.0)
    unified = Unified(max_num_seqs=1)
    for name in ("runs", "waits"):
        unified.submit(request(name, tuple(range(1, 10)), 20))
    for _ in range(3):
        unified.tick()
    scheduler, metrics, loop = unified.engine.scheduler, unified.engine.metrics, unified.engine.loop
    assert loop is not None
    free = scheduler.num_free_pages
    assert 0 < free < scheduler.num_pages
    assert metrics.cache.pages_free._value.get() == free
    assert metrics.cache.pages_used._value.get() == scheduler.num_pages - free
    assert f"jdisagg_kv_usage_ratio {(scheduler.num_pages - free) / scheduler.num_pages}\n" in metrics.text()
    shown = {state: metrics.requests.live.labels(state=state)._value.get() for state in scheduler.counts()}
    assert shown == scheduler.counts()
    assert (loop.load.running, loop.load.waiting) == (1, 1)
    assert (loop.load.free_pages, loop.load.total_pages) == (free, scheduler.num_pages)
    assert loop.load.pending_prefill_tokens == 0, "only a prefill worker says"


def test_what_a_scheduler_counts_is_shown_though_no_step_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of one token has it from P: D looks its prompt up, and computes nothing."""
    monkeypatch.setattr(engine_loop, "IDLE_WAIT_S", 0.0)
    world = World(local_prefill=False)
    for name in ("a", "b"):
        world.submit(request(name, tuple(range(3, 22)), 1))
        world.settle()
    asked = world.decode.scheduler.stats.prefix_query_tokens
    assert asked > 0
    assert world.decode.metrics.cache.query_tokens._value.get() == asked
