"""--slow-request-s at a router: what a client waited for there is in no worker's log."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest

from jdisagg.core.errors import Overloaded, Unavailable
from jdisagg.core.requests import Output
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, collect, fleet, stop
from tests.unit.wire.rig import FAST, run_quiet, until


@pytest.mark.parametrize(("slow_request_s", "is_told"), [(0.0, True), (30.0, False)])
def test_a_slow_request_is_logged_with_its_wait_for_a_worker(
    slow_request_s: float, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    address: list[str] = []

    async def body() -> None:
        router = await Router(slow_request_s=slow_request_s).start()
        asked = asyncio.create_task(collect(router, ask("r1", max_tokens=5, traceparent="00-1")))
        await until(lambda: router.engine._count(running=False) == 1)
        (d1,) = await fleet(FakeWorker((router.address,)), router=router)
        await asked
        address.append(d1.address)
        await stop(router, d1)

    run_quiet(body())
    told = [record.message for record in caplog.records if record.name == "jdisagg.core.record"]
    assert len(told) == is_told
    for line in told:
        assert line.startswith("request r1 (traceparent 00-1): length, 5 tokens in ")
        assert re.search(r" = queue \d+\.\d+ s \+ prefill \d+\.\d+ s \+ decode \d+\.\d+ s; ", line)
        assert "queue 0.000" not in line
        assert line.endswith(f"; on decode worker fake @ {address[0]}")


def slow_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "jdisagg.core.record"]


def test_one_that_was_replayed_says_how_often_and_where_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router(slow_request_s=0.0).start()
        (d1,) = await fleet(FakeWorker((router.address,)), router=router)
        outputs: list[Output] = []
        asked = asyncio.create_task(collect(router, ask("r1"), outputs))
        await until(lambda: len(outputs) >= 3)
        d2 = await FakeWorker((router.address,)).start()
        await until(lambda: router.linked() == 2)
        await d1.die()
        await asked
        (line,) = slow_lines(caplog)
        assert line.endswith(f"; replayed 1 time, ended on decode worker fake @ {d2.address}")
        await stop(router, d2)

    run_quiet(body())


def test_one_that_full_workers_passed_on_was_not_replayed_and_one_that_no_worker_took_ended_on_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router(slow_request_s=0.0, config=replace(FAST, worker_wait_s=0.1)).start()
        with pytest.raises(Unavailable):
            await collect(router, ask("r1"))
        d1, d2 = await fleet(FakeWorker((router.address,)), FakeWorker((router.address,)), router=router)
        d1.engine.refusals = d2.engine.refusals = [Overloaded("full")]
        await collect(router, ask("r2"))
        nowhere, passed_on = slow_lines(caplog)
        assert nowhere.endswith("; on no worker")
        assert "; on decode worker fake @ " in passed_on
        await stop(router, d1, d2)

    run_quiet(body())


def test_one_that_nobody_took_behind_a_loss_names_who_lost_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router(slow_request_s=0.0, config=replace(FAST, worker_wait_s=0.1)).start()
        (d,) = await fleet(FakeWorker((router.address,)), router=router)
        d.engine.frozen = True
        task = asyncio.create_task(collect(router, ask("r1")))
        await until(lambda: d.engine.live)
        await d.die()
        await task
        (line,) = slow_lines(caplog)
        assert line.endswith(f"ended on worker fake @ {d.address}, which lost it")
        await router.stop()

    run_quiet(body())
