"""uvicorn inside an event loop that already runs, on a socket bound beforehand (so port 0 works and its number is known)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from jdisagg.api.channels import join_address
from jdisagg.api.http.crowd import Crowd
from jdisagg.api.http.protocol import Protocol
from jdisagg.api.listening import BACKLOG
from jdisagg.api.tasks import cancel_and_wait
from jdisagg.core.errors import ConfigError

_START_TIMEOUT_S = 10.0


class _Server(uvicorn.Server):
    """Leaves signals to the process it is part of."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """A listening socket and, between `start` and `stop`, the server on it."""

    def __init__(self, app: ASGIApp, listener: socket.socket, *, on_refused: Callable[[], object] = lambda: None) -> None:
        """`on_refused`: called for each connection that there is no room for."""
        listener.setblocking(False)
        self._listener = listener
        self.host, self.port = listener.getsockname()[:2]
        self.address = join_address(self.host, self.port)
        config = uvicorn.Config(
            app,
            loop="none",
            http=cast(Any, partial(Protocol, crowd=Crowd(on_refused))),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            backlog=BACKLOG,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when connections are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="http")
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not self._server.started:
                if self._task.done():
                    self._task.result()
                    raise ConfigError(f"the HTTP server on {self.address} ended while starting")
                await asyncio.sleep(0.005)

    async def stop(self, deadline_s: float) -> None:
        """Accept nothing more, let open requests end until the (monotonic) deadline, or for a second; cut the rest, close.
        Idempotent. Raises what the server failed with, once it is closed."""
        task, self._task = self._task, None
        if task is None:
            self._listener.close()
            return
        self._server.config.timeout_graceful_shutdown = timeout_s = max(1, round(deadline_s - monotonic()))
        self._server.should_exit = True
        try:
            done, _ = await asyncio.wait([task], timeout=timeout_s + 5.0)
            if not done:
                await cancel_and_wait(task)
            else:
                task.result()
        finally:
            self._cut()
            await asyncio.sleep(0)  # each hears of it before the loop may end

    def _cut(self) -> None:
        """Close what uvicorn left open: if it failed, maybe everything."""
        for listening in getattr(self._server, "servers", ()):  # there once it has started
            listening.close()
        self._listener.close()
        for connection in list(self._server.server_state.connections):  # with bytes that nobody takes
            cast(Any, connection).transport.abort()
