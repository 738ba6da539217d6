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


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stream_goes_on_within_about_a_second(how):
    async def body() -> None:
        router = await Router(config=TransferConfig()).start()
        command = [sys.executable, "-m", "tests.unit.router.worker_process", router.address, "epoch-x"]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
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
