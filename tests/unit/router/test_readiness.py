"""A worker that says that it cannot serve gets no requests: who asks waits for one that can, or is told why there is none."""

from __future__ import annotations

import asyncio

import pytest

from jdisagg.core.errors import Unavailable
from jdisagg.core.fleet import Load, Report
from jdisagg.core.requests import Role
from jdisagg.router.fleet import Fleet
from jdisagg.router.fleet_gauges import count_there
from jdisagg.router.recovery import ReplayConfig
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, assert_whole, collect, fleet, stop
from tests.unit.router.test_late_registrations import MEMBER
from tests.unit.wire.rig import FAST, member, run_quiet, until

WHY = "no usable prefill worker (p:1: Hello: UNAVAILABLE: nobody is there)"


@pytest.mark.covers("C12")
def test_nobody_is_sent_to_a_worker_that_reaches_no_prefill_worker(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.2)).start()
        one, other = await fleet(*(FakeWorker((router.address,)) for _ in range(2)), router=router)
        one.not_ready = WHY
        await until(lambda: count_there(router.engine.workers.fleet, Role.DECODE) == 1)
        for number in range(4):
            assert_whole(asked := ask(f"r{number}", 3), await collect(router, asked))
        assert (len(one.engine.seen), len(other.engine.seen)) == (0, 4)
        assert router.engine.health().serves

        other.not_ready = WHY
        await until(lambda: not router.engine.health().serves)
        named = [entry.member.worker for entry in router.engine.workers.fleet.entries()]  # in order of registration
        assert sorted(named) == sorted(f"fake @ {worker.address}" for worker in (one, other))
        said = f"no decode or unified worker is ready ({named[0]}: {WHY}; {named[1]}: {WHY})"
        assert router.engine.health().reason == said
        with pytest.raises(Unavailable) as caught:
            await collect(router, ask("r5"))
        assert caught.value.message.startswith(f"request r5: {said}; waited 0 s: start one")
        assert router.replays() == 0
        assert [entry.summary(0.0)["not_ready"] for entry in router.engine.workers.fleet.entries()] == [WHY, WHY]
        await stop(router, one, other)

    run_quiet(body())
    told = [record.getMessage() for record in caplog.records if "gets no requests until it is ready" in record.getMessage()]
    assert len(told) == 2, "and not with every heartbeat"
    assert all(line.endswith(f": {WHY}") for line in told)


def test_who_waits_goes_on_as_soon_as_a_worker_is_ready_again() -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=60.0)).start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        worker.not_ready = WHY
        await until(lambda: not router.engine.health().serves)
        task = asyncio.create_task(collect(router, asked := ask("r1", 5)))
        await asyncio.sleep(0.1)
        assert not worker.engine.seen
        worker.not_ready = ""
        assert_whole(asked, await task)
        await stop(router, worker)

    run_quiet(body())


def test_what_runs_on_a_worker_that_is_no_longer_ready_goes_on() -> None:
    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        task = asyncio.create_task(collect(router, asked := ask("r1", 60)))
        await until(lambda: worker.engine.live)
        worker.not_ready = WHY
        await until(lambda: not router.engine.health().serves)
        assert_whole(asked, await task)
        await stop(router, worker)

    run_quiet(body())


def test_one_that_registers_and_is_not_ready_waits_for_its_first_good_heartbeat() -> None:
    found = Fleet(dead_after_s=1.0)
    found.register(member(MEMBER, role=Role.DECODE, not_ready=WHY), 10.0)
    (entry,) = found.entries()
    found.link(entry, 10.0)
    assert found.choose(None, 10.0) is None
    assert WHY in found.usable(None).lacks
    assert found.heartbeat(entry.member.address, entry.member.epoch, Report(Load()), 10.1)
    assert found.choose(None, 10.1) is entry
    assert found.usable(None).lacks == ""


@pytest.mark.parametrize("draining", [False, True])
def test_of_many_that_are_not_there_a_few_are_named(draining: bool) -> None:
    """Each request that fails then tells its client, and the log."""
    found = Fleet(dead_after_s=1.0)
    for number in range(300):
        one = member(MEMBER, address=f"h:{number}", worker=f"d{number}", role=Role.DECODE, not_ready=WHY, draining=draining)
        found.register(one, 10.0)
        found.link(found.entries()[-1], 10.0)
    named = "d0, d1, d2, d3, 296 more" if draining else f"d0: {WHY}; d1: {WHY}; d2: {WHY}; d3: {WHY}; 296 more"
    assert found.usable(None).lacks.endswith(f"({named})")


def test_a_router_that_restarts_says_who_is_not_ready_as_soon_as_that_one_registers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        worker.not_ready = WHY
        await until(lambda: not router.engine.health().serves)
        await router.stop()
        caplog.clear()
        router = await Router().start(int(router.address.rpartition(":")[2]))
        await until(router.linked)
        await asyncio.sleep(3 * FAST.heartbeat_s)
        worker.not_ready = ""
        await until(lambda: router.engine.health().serves)
        await stop(router, worker)

    run_quiet(body())
    told = [record.getMessage() for record in caplog.records if record.name == "jdisagg.router.worker_news"]
    (not_ready,) = (line for line in told if line.endswith(f"gets no requests until it is ready: {WHY}"))
    (ready,) = (line for line in told if line.endswith(" is ready"))
    assert told.index(not_ready) < told.index(ready)


def test_what_is_more_useful_to_know_is_said_first() -> None:
    """That all drain, or that no prefill worker is there at all, is why they are not ready, or more than that."""
    found = Fleet(dead_after_s=1.0)
    found.register(member(MEMBER, role=Role.DECODE, not_ready=WHY, needs_prefill=True), 10.0)
    (entry,) = found.entries()
    found.link(entry, 10.0)
    assert found.usable(None).lacks.startswith("no prefill worker that pairs with")
    found.heartbeat(entry.member.address, entry.member.epoch, Report(Load(), True, WHY), 10.1)
    assert "is draining" in found.usable(None).lacks
