"""Connections that clients keep, when the process is about to end."""

from __future__ import annotations

import asyncio
import http.client

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from jdisagg.api.http.server import HttpServer
from jdisagg.api.listening import listen
from jdisagg.serve.leaving import Leaving


async def answer(request: Request) -> Response:
    return PlainTextResponse("here")


def test_a_process_that_ends_hangs_up_after_its_answers_and_no_other_does() -> None:
    async def body() -> None:
        app = Leaving(Starlette(routes=[Route("/", answer)]))
        server = HttpServer(app, listen())
        await server.start()
        client = http.client.HTTPConnection(server.host, server.port, timeout=10)

        def ask() -> tuple[str | None, bool]:
            """What the answer says of the connection, and whether the client keeps it."""
            client.request("GET", "/")
            answered = client.getresponse()
            assert answered.read() == b"here"
            return answered.getheader("connection"), client.sock is not None

        assert [await asyncio.to_thread(ask) for _ in range(2)] == [(None, True)] * 2
        app.leave()
        assert await asyncio.to_thread(ask) == ("close", False)
        assert await asyncio.to_thread(ask) == ("close", False), "a new connection"
        await server.stop(0.0)

    asyncio.run(asyncio.wait_for(body(), 30.0))
