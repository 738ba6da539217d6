"""A worker process that is stopped or killed under a stream."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from jdisagg.core.config import TransferConfig
from jdisagg.core.requests import EngineRequest, Output, SamplingParams
from tests.unit.router.fakes import FakeWorker, Router, expected
from tests.unit.router.rig import collect, tokens
from tests.unit.wire.rig import request, run_quiet, until

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def serving(num_workers: int = 1, **options: float) -> AsyncIterator[tuple[Router, list[subprocess.Popen[bytes]]]]:
    """A router that is linked with so many worker processes."""
    router = await Router(config=TransferConfig(), **options).start()
    command = [sys.executable, "-m", "tests.unit.router.worker_process", router.address]
    processes = [
        subprocess.Popen([*command, f"epoch-{number}"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for number in range(num_workers)
    ]
    try:
        await until(lambda: router.linked() == num_workers, limit_s=60.0)
        yield router, processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    await router.stop()


async def streaming(router: Router) -> tuple[EngineRequest, list[Output], asyncio.Task[None]]:
    """A request with some tokens, what has come of it, and who collects that. Its worker goes on for seconds, in which this
    process may stand still."""
    asked, outputs = request("r", prompt=(5, 6), sampling=SamplingParams(max_tokens=1000)), list[Output]()
    task = asyncio.create_task(collect(router, asked, outputs))
    await until(lambda: len(outputs) >= 3)
    return asked, outputs, task


def rush(worker: FakeWorker) -> None:
    """All that it has to do, at once."""
    while worker.engine.live:
        worker.engine.tick()


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stream_goes_on_within_about_a_second(how):
    async def body() -> None:
        async with serving() as (router, (process,)):
            asked, outputs, task = await streaming(router)
            heir = await FakeWorker((router.address,), config=TransferConfig()).start()
            await until(lambda: router.linked() == 2)
            process.send_signal(how)
            assert await until(lambda: heir.engine.live) < 1.6
            rush(heir)
            await task
            assert tokens(outputs) == expected(asked)
            assert outputs[-1].finish is not None
            if how is signal.SIGSTOP:
                process.send_signal(signal.SIGCONT)
                await until(lambda: router.linked() == 2)  # it finds its way back by itself
            await heir.die()

    run_quiet(body())


@pytest.mark.parametrize("num_workers", [1, 2])
def test_when_all_workers_pause_at_once_their_streams_go_on_where_they_are(
    num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with serving(num_workers) as (router, processes):
            asked = [request(f"r{i}", prompt=(5, i), sampling=SamplingParams(max_tokens=100)) for i in range(4)]
            outputs: list[list[Output]] = [[] for _ in asked]
            tasks = [asyncio.create_task(collect(router, *both)) for both in zip(asked, outputs, strict=True)]
            await until(lambda: all(len(got) >= 3 for got in outputs))
            for process in processes:
                process.send_signal(signal.SIGSTOP)
            await until(lambda: caplog.text.count("as is everybody") == num_workers)
            assert not router.engine.health().serves
            late = asyncio.create_task(collect(router, request("late", prompt=(7,), sampling=SamplingParams(max_tokens=3))))
            await asyncio.sleep(1.0)
            assert not late.done(), "a new one waits for somebody who is heard"
            for process in processes:
                process.send_signal(signal.SIGCONT)
            await asyncio.gather(*tasks, late)
            assert [tokens(got) for got in outputs] == [expected(one) for one in asked]
            assert router.replays() == 0

    run_quiet(body())


def test_a_worker_that_is_waited_for_is_given_up_for_one_that_has_come(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with serving() as (router, (process,)):
            asked, outputs, task = await streaming(router)
            process.send_signal(signal.SIGSTOP)
            await until(lambda: "as is everybody" in caplog.text)
            heir = await FakeWorker((router.address,), config=TransferConfig()).start()
            await until(lambda: heir.engine.live, limit_s=6.0)
            stream = router.engine.workers.fleet.entries()[-1].stream
            assert stream is not None
            assert stream.steady_s == stream.since_s + 1.0, "a new worker takes over a moment after it came"
            rush(heir)
            await task
            assert tokens(outputs) == expected(asked)
            await heir.die()

    run_quiet(body())
