"""grpc.health.v1 that follows the engine's health, and server reflection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jdisagg.api.generation.token_engine import Health
from jdisagg.api.status_details import end_call
from jdisagg.api.tasks import AFTER_BUG_S, cancel_and_wait

log = logging.getLogger(__name__)

POLL_S = 0.25
_LONGEST_NAME = 200  # characters
_UNKNOWN = "no such service here; reflection lists those there are"


class HealthReporter:
    """Serves the health service on `server` for "" and each of `services`; SERVING means healthy and ready.

    Construct before the server starts; `start` on the loop, `close` when draining begins or the process ends.
    """

    def __init__(self, server: grpc.aio.Server, services: tuple[str, ...], status: Callable[[], Health]) -> None:
        """`services` are full names ("jdisagg.v1.WorkerService"); they are listed by reflection as well."""
        self._servicer = _Servicer(frozenset(("", *services)))
        self._status = status
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)

    async def start(self) -> None:
        """Report now and from now on."""
        if self._is_over:
            return
        self._report()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """NOT_SERVING for good."""
        self._is_over = True
        if self._task is not None:
            await cancel_and_wait(self._task)
        self._servicer.tell(serving=False)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                self._report()
            except Exception:  # a bug of ours: what was reported last need not be true any more
                log.exception("the health of this process cannot be told: not serving")
                self._servicer.tell(serving=False)
                await asyncio.sleep(AFTER_BUG_S)

    def _report(self) -> None:
        self._servicer.tell(serving=self._status().serves)


class _Servicer(health_pb2_grpc.HealthServicer):
    """One status for all names. The library's own writes to a watcher under a lock that it takes to tell a status, too: a
    watcher that reads nothing would keep every other from learning more, and a drain from going on."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._status = health_pb2.HealthCheckResponse.NOT_SERVING
        self._changed = asyncio.Event()  # a new one after each change

    def tell(self, *, serving: bool) -> None:
        """The status from now on; on the event loop."""
        wanted = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        if wanted != self._status:
            changed, self._changed, self._status = self._changed, asyncio.Event(), wanted
            changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse | None:
        """The status now; NOT_FOUND for a service that is not served here."""
        if request.service in self._names:
            return health_pb2.HealthCheckResponse(status=self._status)
        end_call(context, grpc.StatusCode.NOT_FOUND, _UNKNOWN)

    async def List(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """The status of each service now."""
        status = health_pb2.HealthCheckResponse(status=self._status)
        listed = health_pb2.HealthListResponse  # pyright: ignore[reportAttributeAccessIssue]  # newer than the stubs
        return listed(statuses=dict.fromkeys(self._names, status))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """The status now and whenever it is another one than was told last; SERVICE_UNKNOWN where that is not served here, and
        NOT_FOUND where nobody names a service so: its name would stay in memory until the client goes."""
        if len(request.service) > _LONGEST_NAME:
            end_call(context, grpc.StatusCode.NOT_FOUND, _UNKNOWN)
            return
        if request.service not in self._names:
            await context.write(health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN))
            await asyncio.Event().wait()  # until the client goes: what is served does not change
        told = None
        while True:
            status, changed = self._status, self._changed
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            else:
                await changed.wait()
