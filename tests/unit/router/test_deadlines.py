"""A request ends at its deadline, whatever it waits for."""

from __future__ import annotations

import asyncio

import pytest

from jdisagg.core.errors import DeadlineExceeded, HandoffLost
from jdisagg.router import recovery
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, collect, fleet, stop
from tests.unit.wire.rig import run_quiet


def test_a_request_that_pauses_before_it_asks_again_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr(recovery, "LONGEST_PAUSE_S", 3600.0)

    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        worker.engine.refuse = HandoffLost("every rung failed")
        number = 0
        while not worker.engine.seen:  # a machine that stands still may let one end before it is there
            number += 1
            (output,) = await asyncio.wait_for(collect(router, ask(f"r{number}", left_s=0.5 * number)), 15.0)
            assert isinstance(output.error, DeadlineExceeded)
        asked = [request.request_id for request in worker.engine.seen]
        assert len(asked) == len(set(asked)), "once"
        await stop(router, worker)

    run_quiet(body())
