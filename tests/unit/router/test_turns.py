"""All requests of a worker that is lost are placed anew, a few in each turn of the router's loop."""

from __future__ import annotations

import asyncio

import pytest

from jdisagg.api.turns import PER_TURN
from jdisagg.router.flight import Flight
from jdisagg.router.placement import Placement
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, assert_whole, collect, fleet, stop
from tests.unit.wire.rig import RUN_LIMIT_S, run_quiet, until

NUM = 5 * PER_TURN


def test_a_lost_workers_requests_do_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = list[Flight]()
    place = Placement.place
    monkeypatch.setattr(Placement, "place", lambda self, flight, now_s: [placed.append(flight), place(self, flight, now_s)][1])

    async def run() -> None:
        router = await Router().start()
        (first,) = await fleet(FakeWorker((router.address,)), router=router)
        asked = [ask(f"r{number}", max_tokens=600, left_s=RUN_LIMIT_S) for number in range(NUM)]
        calls = [asyncio.create_task(collect(router, each)) for each in asked]
        await until(lambda: len(first.engine.live) == NUM)
        first.engine.frozen = True  # nobody ends before they are lost
        second = await FakeWorker((router.address,)).start()
        await until(lambda: router.linked() == 2)
        placed.clear()
        dying = asyncio.create_task(first.die())  # they are placed while it does
        most, seen = 0, 0
        async with asyncio.timeout(20):
            while len(placed) < NUM:
                await asyncio.sleep(0)
                most, seen = max(most, len(placed) - seen), len(placed)
        await dying
        assert most == PER_TURN
        for each, outputs in zip(asked, await asyncio.gather(*calls), strict=True):
            assert_whole(each, outputs)
        await stop(router, second)

    run_quiet(run())
