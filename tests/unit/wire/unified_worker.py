"""A unified worker on a socket, of which only the device is arithmetic, and what one router gets from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from jdisagg.api.generation.local_engine import LocalEngine
from jdisagg.api.worker.client import WorkerLink
from jdisagg.api.worker.service import WorkerService
from jdisagg.core.fleet import ModelCard
from jdisagg.core.requests import FinishReason, Output, Role
from jdisagg.roles.engine_loop import IDLE_WAIT_S
from jdisagg.roles.engine_thread import EngineThread
from jdisagg.roles.unified import UnifiedRole
from jdisagg.v1 import worker_pb2_grpc
from tests.unit.roles.engine import Engine
from tests.unit.sched.engine_fake import request
from tests.unit.wire.rig import FAST, run_quiet, start_server, until

CARD = ModelCard(name="m", max_model_len=48, vocab_size=31, eos_token_ids=(0,), fingerprint="f")


class FrontEnd:
    """What one router has got from the worker."""

    def __init__(self, address: str, name: str = "") -> None:
        self.outputs: list[Output] = []
        self.downs: list[str] = []
        self.link = WorkerLink(
            address,
            config=FAST,
            on_outputs=self.outputs.extend,
            on_up=lambda: None,
            on_down=self.downs.append,
            on_load=lambda load, num_cancelled: None,
            on_quiet=lambda is_quiet: None,
            waits=lambda silent_s: False,
            router=name,
        )

    def of(self, request_id: str) -> list[Output]:
        return [output for output in self.outputs if output.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.of(request_id) for token in output.token_ids]

    def ends(self) -> list[FinishReason]:
        return [output.finish for output in self.outputs if output.finish is not None]


class Worker:
    """A unified worker."""

    def __init__(self) -> None:
        self.engine = Engine(Role.UNIFIED, 24, local_prefill=True)
        self.engine.run(UnifiedRole(self.engine.scheduler))
        assert self.engine.loop is not None
        self.crashes: list[BaseException] = []
        self.thread = EngineThread(self.engine.loop, name="engine", on_crash=self.crashes.append)
        self.local = LocalEngine(self.thread, CARD, not_ready_reason=lambda: "")
        self.service = WorkerService(self.local, FAST)
        self.address = ""

    @property
    def num_posted(self) -> int:
        """Messages that the frozen engine has not looked at."""
        return self.engine.inbox._queue.qsize()

    async def freeze(self) -> None:
        """The engine looks at nothing until it is thawed."""
        self.thread.is_frozen = True
        await asyncio.sleep(3 * IDLE_WAIT_S)  # an idle tick may be waiting for a first message
        assert self.num_posted == 0

    async def streams(self) -> list[str]:
        return (await self.local.debug_state())["streams"]


@asynccontextmanager
async def working() -> AsyncIterator[Worker]:
    worker = Worker()
    server, worker.address = await start_server(
        lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker.service, server)
    )
    worker.thread.start()
    try:
        yield worker
        await until(worker.engine.scheduler.is_idle)
        assert worker.engine.scheduler.num_free_pages == worker.engine.scheduler.num_pages
    finally:
        await server.stop(0)
        worker.thread.is_frozen = False
        assert await asyncio.to_thread(worker.thread.stop, 5.0)
    assert not worker.crashes


def checked(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_quiet(body())


async def everything(worker: Worker, request_id: str) -> list[Output]:
    return [output async for output in worker.local.generate(request(request_id, (1, 2, 3), 8))]
