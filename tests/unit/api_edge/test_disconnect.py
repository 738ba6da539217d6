"""A client that goes away frees everything at once, whatever it was waiting for."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from jdisagg.api.generation.ends import Ends
from jdisagg.api.http import connection, protocol, server
from jdisagg.api.listening import listen
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, Served, run, serving
from tests.unit.ports import kept_port

ANSWER = "the quick brown fox " * 8


async def _send(
    served: Served, path: str, body: dict[str, Any], *, receive_buffer_bytes: int = 65_536
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", served.port))
    reader, writer = await asyncio.open_connection(sock=client)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


async def _until_live(served: Served, count: int) -> None:
    while len(served.engine.live) < count:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("abrupt", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("delay_s", [0.02, 60.0], ids=["between tokens", "before the first token"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_dropped_connection_cancels_every_choice(
    tokenizer: Tokenizer, path: str, delay_s: float, stream: bool, abrupt: bool
) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, ANSWER)
        engine.delay_s = delay_s
        async with serving(engine, tokenizer) as served:
            body = {
                "prompt": "hi",
                "messages": [{"role": "user", "content": "hi"}],
                "n": 3,
                "max_tokens": 100,
                "stream": stream,
            }
            reader, writer = await _send(served, path, body)
            await _until_live(served, 3)
            if stream and delay_s < 1:
                assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            if abrupt:
                linger = socket.SO_LINGER
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, linger, b"\x01\0\0\0\0\0\0\0")
                writer.transport.abort()
            else:
                writer.close()
            start_s = monotonic()
            await served.wait_idle()
            assert monotonic() - start_s < 10.0, "long before the next token"
            assert len(engine.cancelled) == 3

    run(check())


def test_a_reader_that_stalls_does_not_hold_the_engine(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, ANSWER * 2000, max_model_len=200_000)  # some 9 MB of events: more than sockets hold
        engine.tokens_per_output = 500
        async with serving(engine, tokenizer) as served:
            body = {"prompt": "hi", "max_tokens": 100_000, "stream": True, "logprobs": 1}
            _, writer = await _send(served, "/v1/completions", body, receive_buffer_bytes=4096)
            await _until_live(served, 1)
            async with asyncio.timeout(60.0):
                while engine.live:
                    await asyncio.sleep(0.01)
            assert engine.cancelled == []  # it ran to its end while nobody read
            assert len(served.edge._live) == 1
            writer.close()
            await served.wait_idle()

    run(check())


def test_one_client_going_away_leaves_the_others_alone(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, ANSWER)
        engine.delay_s = 0.005
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            _, writer = await _send(served, "/v1/completions", {"prompt": "hi", "max_tokens": 100, "stream": True})
            other = asyncio.create_task(http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 30}))
            await _until_live(served, 2)
            writer.close()
            assert (await other).json()["usage"]["completion_tokens"] == 30
            await served.wait_idle()
            assert len(engine.cancelled) == 1

    run(check())


def test_stopping_the_server_ends_streams_and_frees_the_port(tokenizer: Tokenizer) -> None:
    async def check(port: int) -> None:
        engine = FakeEngine(tokenizer, ANSWER)
        engine.delay_s = 60.0
        async with serving(engine, tokenizer, port=port) as served:
            _, writer = await _send(served, "/v1/completions", {"prompt": "hi", "stream": True})
            await _until_live(served, 1)
            writer.close()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
        listen(port=port).close()

    with kept_port() as port:
        run(check(port))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_takes_nothing_of_its_answer_loses_its_connection(
    tokenizer: Tokenizer, stream: bool, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing it would wait for ever for the rest to be taken. One that reads slowly keeps it."""
    monkeypatch.setattr(protocol, "UNREAD_TIMEOUT_S", 0.3)
    read: list[bytes] = []
    if reads:
        monkeypatch.setattr(protocol.Protocol, "_reader_is_late", _once_it_had_its_turn(read, 3))
    ends: list[asyncio.Transport] = []
    monkeypatch.setattr(protocol.Protocol, "connection_made", _noting(ends, protocol.Protocol.connection_made))

    async def check() -> None:
        loop = asyncio.get_running_loop()
        engine = FakeEngine(tokenizer, "the quick brown fox " * 1000, max_model_len=20_000)
        engine.tokens_per_output = 100
        async with serving(engine, tokenizer) as served:
            body = json.dumps({"prompt": "the", "max_tokens": 9000, "stream": stream, "logprobs": 1, "n": 4}).encode()
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", served.port))
                head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
                await loop.sock_sendall(client, head.encode() + body)
                while not ends:
                    await asyncio.sleep(0.01)
                ends[0].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                for _ in range(10 if reads else 100):
                    await asyncio.sleep(0.1)
                    if reads:
                        read.append(await loop.sock_recv(client, 4096))
                        assert read[-1]
                    if ends[0].is_closing() and not ends[0].get_write_buffer_size():
                        break
                assert ends[0].is_closing() is not reads
            await served.wait_idle()

    run(check())


@pytest.mark.parametrize("keeps_alive", [True, False])
def test_a_client_that_leaves_the_end_of_its_answer_loses_its_connection(
    keeps_alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little of it waits: too little to make whoever writes it wait, who is through with it."""
    monkeypatch.setattr(protocol, "UNREAD_TIMEOUT_S", 0.3)

    async def check() -> None:
        ends: list[asyncio.Transport] = []
        monkeypatch.setattr(protocol.Protocol, "connection_made", _noting(ends, protocol.Protocol.connection_made))
        lost: list[Any] = []
        monkeypatch.setattr(protocol.Protocol, "connection_lost", _noting(lost, protocol.Protocol.connection_lost))
        served = server.HttpServer(_until_some_waits(ends), listen())
        await served.start()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, (served.host, served.port))
            head = b"GET / HTTP/1.1\r\nhost: x\r\n%s\r\n" % (b"" if keeps_alive else b"connection: close\r\n")
            await asyncio.get_running_loop().sock_sendall(client, head)
            async with asyncio.timeout(20.0):
                while not lost:
                    await asyncio.sleep(0.01)
        await served.stop(0.0)

    run(check())


@pytest.mark.parametrize("at_once", [True, False])
def test_a_client_that_asks_again_and_leaves_a_whole_answer_loses_its_connection(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next answer cannot begin before that is taken."""
    monkeypatch.setattr(protocol, "UNREAD_TIMEOUT_S", 0.5)
    again = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"

    async def check() -> None:
        loop = asyncio.get_running_loop()
        lost: list[Any] = []
        monkeypatch.setattr(protocol.Protocol, "connection_lost", _noting(lost, protocol.Protocol.connection_lost))
        served = server.HttpServer(PlainTextResponse("x" * 2**24), listen())
        await served.start()
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, (served.host, served.port))
            await loop.sock_sendall(client, again * (2 if at_once else 1))
            await asyncio.sleep(0.0 if at_once else 0.2)
            await loop.sock_sendall(client, again * (not at_once))
            async with asyncio.timeout(10.0):
                while not lost:
                    await asyncio.sleep(0.01)
        await served.stop(0.0)

    run(check())


@pytest.mark.parametrize("keeps_alive", [True, False])
def test_a_client_that_takes_its_answer_keeps_its_connection(keeps_alive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "UNREAD_TIMEOUT_S", 0.1)
    ends: list[asyncio.Transport] = []
    monkeypatch.setattr(protocol.Protocol, "connection_made", _noting(ends, protocol.Protocol.connection_made))

    async def check() -> None:
        served = server.HttpServer(_megabytes, listen())
        await served.start()
        limits = httpx.Limits(max_connections=1)
        headers = {} if keeps_alive else {"connection": "close"}
        async with httpx.AsyncClient(limits=limits, headers=headers, timeout=60.0) as client:
            for _ in range(3):
                assert len((await client.get(f"http://{served.address}/")).content) == 2**24
                await asyncio.sleep(0.3)
        assert len(ends) == (1 if keeps_alive else 3)
        await served.stop(0.0)

    run(check())


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_reads_slowly_keeps_its_connection_however_much_the_kernel_holds_for_it(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes more only when a third of what it holds was read, which takes such a client longer than the limit."""
    monkeypatch.setattr(protocol, "UNREAD_TIMEOUT_S", 1.0)
    read: list[bytes] = []
    monkeypatch.setattr(protocol.Protocol, "_reader_is_late", _once_it_had_its_turn(read, 10))

    async def check() -> None:
        async with _asking(streams, monkeypatch, receive_buffer_bytes=2**15, send_buffer_bytes=2**20) as (client, end):
            for _ in range(40):
                read.append(await asyncio.get_running_loop().sock_recv(client, 2**14))
                assert read[-1]
                await asyncio.sleep(0.05)
                assert not end.is_closing()

    run(check())


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_takes_a_little_each_minute_loses_its_connection(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "UNREAD_TIMEOUT_S", 0.5)
    monkeypatch.setattr(protocol, "SLOWEST_IN_ALL_BYTES_PER_S", 2**30)

    async def check() -> None:
        async with (
            _asking(streams, monkeypatch, receive_buffer_bytes=4096, send_buffer_bytes=4096) as (client, end),
            asyncio.timeout(60.0),
        ):
            while not end.is_closing():
                with suppress(ConnectionResetError):
                    await asyncio.get_running_loop().sock_recv(client, 4096)
                await asyncio.sleep(0.1)

    run(check())


def _once_it_had_its_turn(read: list[bytes], num_reads: int) -> Callable[..., None]:
    """In the place of the look at a reader: it waits for a client that this busy process has not let read so often since."""
    look, num_seen = protocol.Protocol._reader_is_late, [0]

    def patient(one: protocol.Protocol, unread_bytes: int, until_s: float) -> None:
        if len(read) - num_seen[0] < num_reads:
            one._reader_timer = one.loop.call_later(0.01, one._reader_is_late, unread_bytes, until_s)
        else:
            num_seen[0] = len(read)
            look(one, unread_bytes, until_s)

    return patient


@pytest.mark.parametrize("streams", [False, True])
def test_a_server_that_stops_leaves_no_connection_to_a_client_that_reads_nothing(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of one when its loop ends is in the way of whoever comes after."""
    ends: list[asyncio.Transport] = []
    monkeypatch.setattr(protocol.Protocol, "connection_made", _noting(ends, protocol.Protocol.connection_made))
    lost: list[Any] = []
    monkeypatch.setattr(protocol.Protocol, "connection_lost", _noting(lost, protocol.Protocol.connection_lost))

    async def check() -> None:
        served = server.HttpServer(_events if streams else _megabytes, listen())
        await served.start()
        with socket.socket() as client:
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, (served.host, served.port))
            await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            async with asyncio.timeout(10.0):
                while not ends or not ends[0].get_write_buffer_size():
                    await asyncio.sleep(0.01)
            await served.stop(0.0)
            assert len(lost) == 1

    run(check())


def _until_some_waits(ends: list[asyncio.Transport]) -> Callable[..., Any]:
    """An application whose answer ends when the kernel takes no more."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while ends[0].get_write_buffer_size() < 20_000:
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


@asynccontextmanager
async def _asking(
    streams: bool, monkeypatch: pytest.MonkeyPatch, *, receive_buffer_bytes: int, send_buffer_bytes: int
) -> AsyncGenerator[tuple[socket.socket, asyncio.Transport]]:
    """A client that has asked a server for 16 MiB, and read nothing: its socket, and the server's end."""
    ends: list[asyncio.Transport] = []
    monkeypatch.setattr(protocol.Protocol, "connection_made", _noting(ends, protocol.Protocol.connection_made))
    served = server.HttpServer(_events if streams else _megabytes, listen())
    await served.start()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (served.host, served.port))
        while not ends:
            await asyncio.sleep(0.01)
        ends[0].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        yield client, ends[0]
    await served.stop(0.0)


async def _megabytes(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(2**10):
        await send({"type": "http.response.body", "body": bytes(2**14), "more_body": True})
    await send({"type": "http.response.body"})


async def _events(scope: Scope, receive: Receive, send: Send) -> None:
    async def rest() -> AsyncGenerator[connection.Event]:
        for _ in range(2**10):
            yield {"text": "x" * 2**14}

    await connection.EventStream({}, rest(), Ends(None))(scope, receive, send)


def _noting(ends: list[asyncio.Transport], connection_made: Callable[..., None]) -> Callable[..., None]:
    def noting(one: protocol.Protocol, transport: asyncio.Transport) -> None:
        ends.append(transport)
        connection_made(one, transport)

    return noting
