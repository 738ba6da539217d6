"""--slow-request-s at a router: what a client waited for there is in no worker's log."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, collect, fleet, stop
from tests.unit.wire.rig import run_quiet, until


@pytest.mark.parametrize(("slow_request_s", "is_told"), [(0.0, True), (30.0, False)])
def test_a_slow_request_is_logged_with_its_wait_for_a_worker(
    slow_request_s: float, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router(slow_request_s=slow_request_s).start()
        asked = asyncio.create_task(collect(router, ask("r1", max_tokens=5, traceparent="00-1")))
        await until(lambda: router.engine._count(running=False) == 1)
        (d1,) = await fleet(FakeWorker((router.address,)), router=router)
        await asked
        await stop(router, d1)

    run_quiet(body())
    told = [record.message for record in caplog.records if record.name == "jdisagg.core.record"]
    assert len(told) == is_told
    for line in told:
        assert line.startswith("request r1 (traceparent 00-1): length, 5 tokens in ")
        assert [word for word in ("queue", "prefill", "decode") if f"{word} 0." in line] == ["queue", "prefill", "decode"]
        assert "queue 0.000" not in line
