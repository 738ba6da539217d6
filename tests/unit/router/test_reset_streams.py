"""Connections that a network resets while the workers behind them live: nobody has died, and no request may fail for it."""

from __future__ import annotations

import asyncio
from time import monotonic

from chaos_kit.proxy import Proxy

from jdisagg.core.requests import Output
from jdisagg.router import workers
from tests.unit.router.fakes import FakeWorker, Router, expected
from tests.unit.router.rig import ask, collect, stop, tokens
from tests.unit.wire.rig import RUN_LIMIT_S, run_quiet, until


def test_a_stream_that_is_reset_is_opened_again_at_once_and_no_death(monkeypatch) -> None:
    monkeypatch.setattr(workers, "RECONNECT_S", 3600.0)

    async def body() -> None:
        router = await Router().start()
        proxies = [await Proxy(lambda *_: None).start() for _ in range(2)]
        there = [FakeWorker((router.address,)) for _ in proxies]
        for worker, proxy in zip(there, proxies, strict=True):
            await worker.start(advertised=f"127.0.0.1:{proxy.port}")
            proxy.target_port = worker.port
        await until(lambda: router.linked() == 2)
        asked, outputs = ask("r1", max_tokens=10_000, left_s=RUN_LIMIT_S), list[Output]()
        stream = asyncio.create_task(collect(router, asked, outputs))
        for attempt in range(3):  # two deaths would fail it
            await until(lambda: tokens(outputs) and sum("r1" in worker.engine.live for worker in there) == 1)
            (victim,) = (index for index, worker in enumerate(there) if "r1" in worker.engine.live)
            (entry,) = (e for e in router.engine.workers.fleet.entries() if e.member.address == there[victim].address)
            await until(lambda entry=entry: monotonic() - entry.stream.since_s > workers.STEADY_S)
            proxies[victim].cut()
            heir = there[1 - victim].engine
            await until(lambda heir=heir: "r1" in heir.live and router.linked() == 2)
            assert router.replays() == attempt + 1
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        await until(lambda: not any(worker.engine.live for worker in there))
        assert tokens(outputs) == expected(asked)[: len(tokens(outputs))]
        assert router.engine._replays.num_quarantined(monotonic()) == 0
        await stop(router, *there)
        for proxy in proxies:
            await proxy.close()

    run_quiet(body())
