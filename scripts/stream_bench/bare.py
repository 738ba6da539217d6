"""What the libraries alone take: uvicorn and grpc.aio with nothing of ours. A given chunk goes to every stream at a rate.

A stream waits for its next chunk on a queue, as anything that gets its tokens from elsewhere must.
"""

from __future__ import annotations

import asyncio
import socket
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio
import uvicorn
import uvloop

from stream_bench.parts import HOST

METHOD = "jdisagg.v1.GenerationService"


class Ticker:
    """Puts `chunk` into every open queue once in `period_s`."""

    def __init__(self) -> None:
        self.chunk = b""
        self.period_s = 0.02
        self.queues: set[asyncio.Queue[bytes]] = set()

    async def run(self) -> None:
        """For ever. A tick that is late is not made up for."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s = max(due_s + self.period_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
            for each in self.queues:
                each.put_nowait(self.chunk)


def serve_bare(pipe: Connection) -> None:
    """The process's main: says the addresses of HTTP and gRPC; then each (period in seconds, chunk) is the rate."""
    uvloop.run(_serve(pipe))


async def _serve(pipe: Connection) -> None:
    ticker = Ticker()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        mine: asyncio.Queue[bytes] = asyncio.Queue()
        ticker.queues.add(mine)
        gone = asyncio.ensure_future(_gone(receive))
        try:
            while not gone.done():
                await send({"type": "http.response.body", "body": await mine.get(), "more_body": True})
        finally:
            ticker.queues.discard(mine)
            gone.cancel()

    async def generate(request: bytes, context: grpc.aio.ServicerContext) -> None:
        mine: asyncio.Queue[bytes] = asyncio.Queue()
        ticker.queues.add(mine)
        try:
            while True:
                await context.write(await mine.get())
        finally:
            ticker.queues.discard(mine)

    listener = socket.create_server((HOST, 0))
    config = uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False)
    server = grpc.aio.server()
    method = grpc.unary_stream_rpc_method_handler(generate)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(METHOD, {"Generate": method}),))
    grpc_port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    pipe.send((f"{HOST}:{listener.getsockname()[1]}", f"{HOST}:{grpc_port}"))
    await asyncio.gather(uvicorn.Server(config).serve(sockets=[listener]), ticker.run(), _be_led(pipe, ticker))


async def _be_led(pipe: Connection, ticker: Ticker) -> None:
    while True:
        ticker.period_s, ticker.chunk = await asyncio.to_thread(pipe.recv)
        pipe.send(True)


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
