"""Routers and workers that go and come back: who says so has left, who does not is lost, and each is told once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import monotonic

import pytest

from jdisagg.core.requests import Role
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, assert_whole, collect, entry_at, fleet, stop
from tests.unit.wire.rig import FAST, IMPATIENT, run_quiet, until


@pytest.mark.parametrize("draining", [False, True])
def test_a_router_that_goes_is_one_short_line_and_none_while_the_worker_drains(draining, caplog):
    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        worker.draining = draining
        await until(lambda: worker.registration.registered()[router.address])
        caplog.clear()
        await router.stop()
        await until(lambda: not worker.registration.registered()[router.address])
        lines = [record.getMessage() for record in caplog.records if record.name == "jdisagg.api.fleet.client"]
        codes = ("UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED")  # between two heartbeats, or in the middle of one, a slow one
        gone = [[f"router {router.address} does not answer ({code}); registering again until it does"] for code in codes]
        assert lines in ([[]] if draining else gone)
        await worker.die()

    run_quiet(body())


def levels(caplog, logger: str, address: str) -> list[str]:
    return [record.levelname for record in caplog.records if record.name == logger and address in record.getMessage()]


async def say_goodbye(router: Router, worker: FakeWorker) -> None:
    """It waits two heartbeats at most, which a machine may stand still for: here of a minute."""
    router.service._config = replace(FAST, heartbeat_s=60.0)
    router.service.leave()
    await router.service.everybody_told()
    assert router.service._told == {worker.address}
    await until(lambda: worker.registration._routers[router.address].is_leaving)


def test_a_router_that_says_goodbye_is_no_outage_and_the_next_one_at_its_address_may_be(caplog):
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        address = router.address
        await say_goodbye(router, worker)
        await router.stop()
        await until(lambda: not worker.registration.registered()[address])
        assert levels(caplog, "jdisagg.api.fleet.client", f"router {address} has stopped, as it said") == ["INFO"]
        again = await Router().start(int(address.rpartition(":")[2]))
        await until(lambda: again.linked() == 1)
        caplog.clear()
        await again.stop()
        await until(lambda: not worker.registration.registered()[address])
        assert levels(caplog, "jdisagg.api.fleet.client", f"router {address} does not answer") == ["WARNING"]
        await worker.die()

    run_quiet(body())


@pytest.mark.parametrize("draining", [False, True])
def test_a_router_that_never_answered_is_told_of_once_and_after_a_while(draining, caplog, monkeypatch):
    monkeypatch.setattr("jdisagg.api.fleet.client.UNHEARD_S", 0.5)

    async def body() -> None:
        router = await Router().start()
        nobody = "127.0.0.1:1"
        began_s = monotonic()
        worker = FakeWorker((router.address, nobody))
        worker.draining = draining
        await fleet(worker, router=router)

        def told() -> list[str]:
            return levels(caplog, "jdisagg.api.fleet.client", f"router {nobody} has not answered for")

        if not draining:
            await until(told)
            assert monotonic() - began_s >= 0.5
        await asyncio.sleep(0.8)  # three more attempts
        assert told() == ([] if draining else ["WARNING"])
        assert not levels(caplog, "jdisagg.api.fleet.client", f"router {router.address} has not answered")
        await stop(router, worker)

    run_quiet(body())


def test_a_worker_whose_heartbeat_comes_late_is_told_goodbye():
    """As it waits for a core."""

    async def body() -> None:
        router = await Router(config=replace(FAST, heartbeat_s=1.0, dead_after_s=60.0)).start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        await until(lambda: worker.registration.registered()[router.address])
        router.service._config = FAST  # by which it is late
        router.service.leave()
        await router.service.everybody_told()
        assert router.service._told == {worker.address}
        await stop(router, worker)

    run_quiet(body())


def test_a_goodbye_never_waits_for_a_worker_that_is_dead():
    async def body() -> None:
        router = await Router(config=replace(FAST, dead_after_s=60.0)).start()
        (worker,) = await fleet(FakeWorker((router.address,), Role.PREFILL), router=router)
        await until(router.engine.workers.members)
        await worker.die()
        router.service.leave()
        await router.service.everybody_told()
        assert router.engine.workers.members(), "it was not waited for until it was given up"
        await router.stop()

    run_quiet(body())


def test_a_router_that_said_that_it_ends_need_not_be_told_of_a_drain(caplog):
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        await say_goodbye(router, worker)
        await router._server.stop(0)
        worker.draining = True
        await worker.registration.announce()
        await stop(router, worker)

    run_quiet(body())
    assert not [record for record in caplog.records if "could not be told" in record.getMessage()]


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
@pytest.mark.parametrize("draining", [False, True])
def test_a_worker_that_drained_has_left_and_any_other_is_lost(draining, role, caplog):
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router(config=IMPATIENT).start()
        (worker,) = await fleet(FakeWorker((router.address,), role), router=router)
        worker.draining = draining
        await worker.announce()
        (entry,) = router.engine.workers.fleet.entries()
        assert entry.member.draining is draining
        await worker.die()
        await until(lambda: not router.engine.workers.members())
        wanted = f"{role.value} worker {entry.member.worker} " + ("has left" if draining else "is lost")
        assert levels(caplog, "jdisagg.router.worker_news", wanted) == ["INFO" if draining else "WARNING"]
        await router.stop()

    run_quiet(body())


def test_a_prefill_worker_that_drained_has_left_though_prompts_wait_that_named_it_first(caplog):
    """They may wait anywhere by then: it was full, or drained already."""
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router(config=IMPATIENT).start()
        prefill = await FakeWorker((router.address,), Role.PREFILL).start()
        await until(router.engine.workers.members)
        (decode,) = await fleet(FakeWorker((router.address,)), router=router)
        decode.engine.frozen = True
        answer = asyncio.create_task(collect(router, asked := ask("r1")))
        entry = entry_at(router.engine.workers.fleet, prefill.address)
        await until(lambda: entry.pending)
        prefill.draining = True
        await prefill.announce()
        await prefill.die()
        await until(lambda: entry not in router.engine.workers.fleet.entries())
        wanted = f"prefill worker {entry.member.worker} has left"
        assert levels(caplog, "jdisagg.router.worker_news", wanted) == ["INFO"]
        assert router.metrics.fleet.lost.labels(reason="evicted")._value.get() == 0
        decode.engine.frozen = False
        assert_whole(asked, await answer)
        await stop(router, decode)

    run_quiet(body())


def test_a_restarted_router_learns_its_fleet_and_its_workers_free_the_old_streams():
    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        task = asyncio.create_task(collect(router, ask("r1", max_tokens=10_000)))
        await until(lambda: worker.engine.live)
        port = int(router.address.rpartition(":")[2])
        await router.stop()
        outputs = await task
        assert outputs[-1].error is not None
        await until(lambda: not worker.engine.live)
        again = await Router().start(port)
        await until(lambda: again.linked() == 1)
        assert_whole(asked := ask("r2"), await collect(again, asked))
        await stop(again, worker)

    run_quiet(body())
