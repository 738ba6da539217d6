"""uvicorn inside an event loop that already runs, on a socket bound beforehand (so port 0 works and its number is known)."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jdisagg.api.listening import BACKLOG, listen
from jdisagg.core.errors import ConfigError

_START_TIMEOUT_S = 10.0
HEADER_TIMEOUT_S = 30.0  # from connecting, or from a request's first byte, to the end of its headers
UNREAD_TIMEOUT_S = 60.0  # a client that takes nothing of what waits for it for so long is gone


class _Protocol(HttpToolsProtocol):
    """Hangs up on a client that does not finish its headers, or takes nothing of its answer: uvicorn alone would keep the
    descriptors of both for ever."""

    _header_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_waiting_for_reader()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_headers()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader(_unread_bytes(self.transport))

    def resume_writing(self) -> None:
        self._stop_waiting_for_reader()
        super().resume_writing()

    def _await_reader(self, unread_bytes: int) -> None:
        self._reader_timer = self.loop.call_later(UNREAD_TIMEOUT_S, self._reader_is_late, unread_bytes)

    def _reader_is_late(self, unread_bytes: int) -> None:
        left_bytes = _unread_bytes(self.transport)
        if left_bytes < unread_bytes:
            self._await_reader(left_bytes)
        else:
            self.transport.abort()

    def _stop_waiting_for_reader(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _await_headers(self) -> None:
        self._stop_waiting()
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._headers_are_late)

    def _headers_are_late(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering:  # a pipelined request: while one waits behind the answer, nothing is read
            self._await_headers()
        else:
            self.transport.close()

    def _stop_waiting(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def _unread_bytes(transport: asyncio.WriteTransport) -> int:
    """What waits here for the client, and in the kernel, which asks for more only when a third of its megabytes is taken."""
    queued = b"\0" * 4
    with suppress(OSError):  # where it cannot tell
        queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
    return transport.get_write_buffer_size() + struct.unpack("i", queued)[0]


class _Server(uvicorn.Server):
    """Leaves signals to the process it is part of."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """A listening socket and, between `start` and `stop`, the server on it."""

    def __init__(self, app: ASGIApp, listener: socket.socket, *, stop_timeout_s: float) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._stop_timeout_s = stop_timeout_s
        self.host, self.port = listener.getsockname()[:2]
        config = uvicorn.Config(
            app,
            loop="none",
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(stop_timeout_s)),
            backlog=BACKLOG,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def start(self) -> None:
        """Return when connections are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="http")
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not self._server.started:
                if self._task.done():
                    self._task.result()
                    raise ConfigError(f"the HTTP server on {self.address} ended while starting")
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Accept nothing more, let open requests end for at most `stop_timeout_s`, close. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            self._listener.close()
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait([task], timeout=self._stop_timeout_s + 5.0)
        if not done:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            task.result()


def make_server(app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0, stop_timeout_s: float = 5.0) -> HttpServer:
    """`listen` and a server on it; serving begins with `start`. Raises ConfigError when the address is taken."""
    return HttpServer(app, listen(host, port), stop_timeout_s=stop_timeout_s)
