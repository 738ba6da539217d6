"""The HTTP server's beginning and end: a worker that loads is alive and not ready; one that has drained waits for nobody."""

from __future__ import annotations

import asyncio
import http.client
from time import monotonic

import httpx
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from jdisagg.api.http.server import HttpServer
from jdisagg.api.http.staged import REASON, StagedApp
from jdisagg.api.http.version import package_version
from jdisagg.api.listening import listen


def test_probes_are_answered_before_there_is_an_application_and_everything_else_is_told_to_wait() -> None:
    async def body() -> None:
        app = StagedApp()
        http = HttpServer(app, listen())
        await http.start()
        async with httpx.AsyncClient(base_url=f"http://{http.address}") as client:
            for path in ("/health", "/ping"):
                health = await client.get(path, headers={"x-request-id": "mine"})
                assert (health.status_code, health.json()) == (200, {"status": "ok"})
                assert health.headers["x-request-id"] == "mine"
            assert (await client.get("/version")).json() == {"version": package_version()}
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "not ready", "reason": REASON})
            assert ready.headers["retry-after"] == "1"
            for asked in (client.get("/metrics"), client.post("/v1/completions", json={"prompt": "x"})):
                answer = await asked
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                assert answer.json()["error"]["message"] == f"{REASON}; ask again when /ready answers 200"
            app.serve(PlainTextResponse("served"))
            assert (await client.get("/health")).text == "served"
        await http.stop(0.0)

    asyncio.run(body())


def test_a_request_that_took_all_of_the_drain_time_gets_no_more_of_it() -> None:
    cut: list[str] = []

    async def body() -> None:
        begun = asyncio.Event()

        async def endless(scope: Scope, receive: Receive, send: Send) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cut.append(scope["path"])
                raise

        http = HttpServer(endless, listen())
        await http.start()
        async with httpx.AsyncClient(base_url=f"http://{http.address}", timeout=None) as client:
            asked = asyncio.create_task(client.get("/for-ever"))
            await begun.wait()
            async with asyncio.timeout(60.0):
                await http.stop(monotonic())
            assert (await asked).status_code == 500

    asyncio.run(body())
    assert cut == ["/for-ever"]


def test_a_process_that_ends_hangs_up_after_its_answers_and_no_other_does() -> None:
    async def body() -> None:
        app = StagedApp()
        app.serve(PlainTextResponse("here"))
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
