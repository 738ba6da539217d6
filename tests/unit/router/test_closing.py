"""A router that has closed: nobody is served, and nobody is told that they will be."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest

from jdisagg.core.errors import Unavailable
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, collect, fleet
from tests.unit.wire.rig import run_quiet


def test_a_router_that_has_closed_is_not_ready_and_takes_and_awaits_nobody() -> None:
    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        assert router.engine.health().serves
        await router.engine.close()
        health = router.engine.health()
        assert (health.healthy, health.serves, health.reason) == (True, False, "draining")
        with pytest.raises(Unavailable, match="draining; use another one"):
            await collect(router, ask("r1"))
        assert not worker.engine.seen
        await worker.die()
        await router.stop()

    run_quiet(body())


def test_a_router_that_closes_before_any_worker_came_keeps_nobody_waiting() -> None:
    async def body() -> None:
        router = await Router().start()
        asked = asyncio.create_task(router.engine.first_card(monotonic() + 60.0))
        await asyncio.sleep(0.01)
        await router.engine.close()
        with pytest.raises(Unavailable, match="draining; use another one"):
            await asyncio.wait_for(asked, 10.0)
        await router.stop()

    run_quiet(body())
