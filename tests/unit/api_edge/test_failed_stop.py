"""An HTTP server whose uvicorn fails is over when it is stopped all the same, and whoever stops it is told."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.types import Receive, Scope, Send

from jdisagg.api.http import server
from jdisagg.api.listening import listen
from tests.unit.api_edge.fakes import run
from tests.unit.ports import kept_port


@pytest.mark.parametrize("failing", ["on_tick", "shutdown"])
def test_a_server_that_failed_leaves_no_connection_when_it_stops_and_says_so_once(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it served, or as it was about to end; its clients may wait for an answer that never comes."""
    asked = asyncio.Event()

    async def never(scope: Scope, receive: Receive, send: Send) -> None:
        asked.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async def fail(*_: object, **__: object) -> bool:
        raise OSError("it fails")

    async def check(port: int) -> None:
        loop, served = asyncio.get_running_loop(), server.HttpServer(never, listen(port=port))
        await served.start()
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, (served.host, served.port))
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.wait_for(asked.wait(), 10.0)
            monkeypatch.setattr(server._Server, failing, fail)
            with pytest.raises(OSError, match="it fails"):
                await served.stop(0.0)
            assert await asyncio.wait_for(loop.sock_recv(client, 1), 10.0) == b"", "its connection is over"
        with pytest.raises(ConnectionRefusedError):
            await asyncio.wait_for(asyncio.open_connection(served.host, served.port), 10.0)
        await served.stop(0.0)

    with kept_port() as port:
        run(check(port))
