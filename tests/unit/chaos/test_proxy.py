"""The harness's forwarder: passes bytes, and does to a connection what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, field

import pytest
from chaos_kit.proxy import TRANSFER_BYTES, Connection, Proxy, Weather

from jdisagg.v1 import peer_pb2

LIMIT_S = 60.0


@dataclass
class Line:
    """A client that talks through a proxy to a server that answers each byte with `reply`."""

    proxy: Proxy
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    transfers: list[Connection] = field(default_factory=list)

    async def ask(self, num_bytes: int = 1, timeout_s: float = 30.0) -> bytes:
        self.writer.write(b"?")
        return await asyncio.wait_for(self.reader.readexactly(num_bytes), timeout_s)

    async def connect_again(self) -> None:
        self.writer.close()
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.proxy.port)

    async def silent(self) -> bool:
        with pytest.raises(TimeoutError):
            await self.ask(timeout_s=0.2)
        return True


def on_a_line(body: Callable[[Line], Awaitable[None]], reply: bytes = b"!") -> None:
    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with closing(writer):  # also where the end of the loop cancels this
                while await reader.read(1):
                    writer.write(reply)

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        transfers: list[Connection] = []
        proxy = await Proxy(lambda _, connection: transfers.append(connection), past=("jax",)).start()
        proxy.target_port = server.sockets[0].getsockname()[1]
        line = Line(proxy, *await asyncio.open_connection("127.0.0.1", proxy.port), transfers)
        try:
            await body(line)
        finally:
            line.writer.close()
            await proxy.close()
            server.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_bytes_pass_and_large_parts_are_told() -> None:
    async def body(line: Line) -> None:
        assert await line.ask(TRANSFER_BYTES) == b"x" * TRANSFER_BYTES
        assert line.proxy.bytes_from_worker == TRANSFER_BYTES
        assert [connection.client_port for connection in line.transfers] == [line.writer.get_extra_info("sockname")[1]]

    on_a_line(body, b"x" * TRANSFER_BYTES)


@pytest.mark.parametrize(("backend", "is_told"), [("jax", True), ("grpc", False)])
def test_what_passes_no_forwarder_is_told_when_it_is_announced(backend: str, is_told: bool) -> None:
    ready = peer_pb2.ChunkReady(key="k", shape=(2, 16, 4, 64), dtype="float32", backend=backend, locator="here")
    message = peer_pb2.PrefillResponse(chunk_ready=ready).SerializeToString()

    async def body(line: Line) -> None:
        assert await line.ask(len(message)) == message
        assert len(line.transfers) == is_told

    on_a_line(body, message)


def test_a_cut_resets_the_connection_and_the_next_one_works() -> None:
    async def body(line: Line) -> None:
        await line.ask()
        line.proxy.cut()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await line.ask()
        await line.connect_again()
        assert await line.ask() == b"!"

    on_a_line(body)


def test_a_stall_holds_bytes_back_and_lets_them_go() -> None:
    async def body(line: Line) -> None:
        line.proxy.set_weather(Weather.STALL)
        assert await line.silent()
        line.proxy.set_weather(Weather.CLEAR)
        assert await asyncio.wait_for(line.reader.readexactly(1), 30) == b"!"

    on_a_line(body)


def test_a_black_hole_gives_nothing_back_and_connections_made_after_it_pass() -> None:
    async def body(line: Line) -> None:
        await line.ask()
        line.proxy.set_weather(Weather.BLACK_HOLE)
        assert await line.silent()
        line.proxy.set_weather(Weather.CLEAR)
        assert await line.silent()
        assert not line.reader.at_eof()
        await line.connect_again()
        assert await line.ask() == b"!"

    on_a_line(body)


def test_a_starving_line_passes_words_and_nothing_more_once_kv_has_come() -> None:
    async def body(line: Line) -> None:
        line.proxy.set_weather(Weather.STARVE)
        assert await line.silent(), "what is large never comes"
        line.proxy.set_weather(Weather.CLEAR)
        assert await line.silent(), "nor what follows it on that connection"
        await line.connect_again()
        assert len(await line.ask(TRANSFER_BYTES)) == TRANSFER_BYTES

    async def words(line: Line) -> None:
        line.proxy.set_weather(Weather.STARVE)
        for _ in range(3):
            assert await line.ask() == b"!"

    on_a_line(body, b"!" * TRANSFER_BYTES)
    on_a_line(words)


def test_a_slow_reader_gets_its_bytes_slowly() -> None:
    async def body(line: Line) -> None:
        line.proxy.slow_bytes_per_s = 10
        line.proxy.set_weather(Weather.SLOW)
        began_s = asyncio.get_running_loop().time()
        await line.ask()
        assert asyncio.get_running_loop().time() - began_s > 0.15

    on_a_line(body)


def test_a_worker_that_is_not_there_refuses() -> None:
    async def body(line: Line) -> None:
        line.proxy.target_port = None
        reader, writer = await asyncio.open_connection("127.0.0.1", line.proxy.port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 30)
        writer.close()

    on_a_line(body)
