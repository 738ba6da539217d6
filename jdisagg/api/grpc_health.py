"""grpc.health.v1 that follows the engine's health, and server reflection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jdisagg.api.generation.token_engine import Health
from jdisagg.api.tasks import cancel_and_wait

log = logging.getLogger(__name__)

POLL_S = 0.25
AFTER_BUG_S = 1.0  # what failed in this process fails again: the log says so once a second


class HealthReporter:
    """Serves the health service on `server` for "" and each of `services`; SERVING means healthy and ready.

    Construct before the server starts; `start` on the loop, `close` when draining begins or the process ends.
    """

    def __init__(self, server: grpc.aio.Server, services: tuple[str, ...], status: Callable[[], Health]) -> None:
        """`services` are full names ("jdisagg.v1.WorkerService"); they are listed by reflection as well."""
        self._servicer = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]  # set at import time
        self._names = ("", *services)
        self._status = status
        self._task: asyncio.Task[None] | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)

    async def start(self) -> None:
        """Report now and from now on."""
        await self._report()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """NOT_SERVING for good."""
        if self._task is not None:
            await cancel_and_wait(self._task)
        await self._servicer.enter_graceful_shutdown()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._report()
            except Exception:  # a bug of ours: what was reported last need not be true any more
                log.exception("the health of this process cannot be told: not serving")
                await self._set(serving=False)
                await asyncio.sleep(AFTER_BUG_S)

    async def _report(self) -> None:
        await self._set(serving=self._status().serves)

    async def _set(self, *, serving: bool) -> None:
        value = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, value)
