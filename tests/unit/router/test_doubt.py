"""A worker that sends what no worker of its model sends did not die of the request, and gets it so often and no more."""

from __future__ import annotations

import asyncio

import pytest

from jdisagg.core.errors import HandoffLost
from jdisagg.core.requests import EngineRequest, Output
from jdisagg.roles.ports import OutputSink
from jdisagg.router.recovery import ReplayConfig
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, collect, fleet, stop
from tests.unit.wire.rig import run_quiet


def test_a_request_that_is_answered_with_nonsense_everywhere_ends_and_is_not_quarantined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(max_refusals=2)).start()
        (liar,) = await fleet(FakeWorker((router.address,)), router=router)

        def lie(request: EngineRequest, sink: OutputSink, front_end: str) -> None:
            liar.engine.seen.append(request)
            sink([Output(request_id=request.request_id, attempt=request.attempt, token_ids=(1000,))])

        monkeypatch.setattr(liar.engine, "submit", lie)
        for name in ("r1", "r1"):
            (output,) = await asyncio.wait_for(collect(router, ask(name)), 15.0)
            assert isinstance(output.error, HandoffLost)
            assert "sent token 1000" in output.error.message
            assert len(liar.engine.seen) == 3
            liar.engine.seen.clear()
        await stop(router, liar)

    run_quiet(body())
