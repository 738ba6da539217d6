"""A worker process that is stopped or killed under a stream."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jdisagg.core.config import TransferConfig
from jdisagg.core.requests import Output, SamplingParams
from tests.unit.router.fakes import FakeWorker, Router, expected
from tests.unit.router.test_fleet_engine import collect, tokens
from tests.unit.wire.rig import request, run_quiet, until

ROOT = Path(__file__).parents[3]


def start_worker(router: Router, epoch: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.unit.router.worker_process", router.address, epoch]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stream_goes_on_within_about_a_second(how):
    async def body() -> None:
        router = await Router(config=TransferConfig()).start()
        process = start_worker(router, "epoch-x")
        try:
            await until(lambda: router.linked() == 1, limit_s=60.0)
            asked = request("r", prompt=(5, 6), sampling=SamplingParams(max_tokens=60))
            outputs: list[Output] = []
            task = asyncio.create_task(collect(router, asked, outputs))
            await until(lambda: len(outputs) >= 3)
            heir = await FakeWorker((router.address,), config=TransferConfig()).start()
            process.send_signal(how)
            assert await until(lambda: heir.engine.live) < 1.6
            await task
            assert tokens(outputs) == expected(asked)
            assert outputs[-1].finish is not None
            if how is signal.SIGSTOP:
                process.send_signal(signal.SIGCONT)
                await until(lambda: router.linked() == 2)  # it finds its way back by itself
            await heir.die()
        finally:
            process.kill()
            process.communicate()
        await router.stop()

    run_quiet(body())


@pytest.mark.parametrize("num_workers", [1, 2])
def test_when_all_workers_pause_at_once_their_streams_go_on_where_they_are(
    num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        router = await Router(config=TransferConfig(), step_timeout_s=30.0).start()
        processes = [start_worker(router, f"epoch-{number}") for number in range(num_workers)]
        try:
            await until(lambda: router.linked() == num_workers, limit_s=60.0)
            asked = [request(f"r{i}", prompt=(5, i), sampling=SamplingParams(max_tokens=100)) for i in range(4)]
            outputs: list[list[Output]] = [[] for _ in asked]
            tasks = [asyncio.create_task(collect(router, *both)) for both in zip(asked, outputs, strict=True)]
            await until(lambda: all(len(got) >= 3 for got in outputs))
            for process in processes:
                process.send_signal(signal.SIGSTOP)
            await until(lambda: caplog.text.count("as is everybody") == num_workers)
            assert not router.engine.health().ready
            late = asyncio.create_task(collect(router, request("late", prompt=(7,), sampling=SamplingParams(max_tokens=3))))
            await asyncio.sleep(1.0)
            assert not late.done(), "a new one waits for somebody who is heard"
            for process in processes:
                process.send_signal(signal.SIGCONT)
            await asyncio.gather(*tasks, late)
            assert [tokens(got) for got in outputs] == [expected(one) for one in asked]
            assert router.replays() == 0
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        await router.stop()

    run_quiet(body())


def test_a_worker_that_is_waited_for_is_given_up_for_one_that_has_come(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        router = await Router(config=TransferConfig(), step_timeout_s=30.0).start()
        process = start_worker(router, "epoch-x")
        try:
            await until(lambda: router.linked() == 1, limit_s=60.0)
            asked, outputs = request("r", prompt=(5, 6), sampling=SamplingParams(max_tokens=60)), list[Output]()
            task = asyncio.create_task(collect(router, asked, outputs))
            await until(lambda: len(outputs) >= 3)
            process.send_signal(signal.SIGSTOP)
            await until(lambda: "as is everybody" in caplog.text)
            heir = await FakeWorker((router.address,), config=TransferConfig()).start()
            await until(lambda: heir.engine.live, limit_s=6.0)
            stream = router.engine.workers.fleet.entries()[-1].stream
            assert stream is not None
            assert stream.steady_s == stream.since_s + 1.0, "where only a connection came back others may be about to"
            await task
            assert tokens(outputs) == expected(asked)
            await heir.die()
        finally:
            process.kill()
            process.communicate()
        await router.stop()

    run_quiet(body())
