"""A fake worker in a process of its own, for tests that freeze or kill one: `worker_process.py ROUTER`."""

from __future__ import annotations

import asyncio
import sys

from jdisagg.core.config import TransferConfig
from tests.unit.router.fakes import FakeWorker


async def main() -> None:
    worker = await FakeWorker((sys.argv[1],), config=TransferConfig(), epoch=sys.argv[2]).start()
    print(worker.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent is gone


asyncio.run(main())
