"""More connections than a process has descriptors for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from jdisagg.api import listening
from jdisagg.api.http import protocol
from jdisagg.api.http.crowd import MOST_SPARE, SPARE_SHARE
from jdisagg.core.errors import Unavailable
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, Served, run, serving

MOST = 10  # so that there is one to spare
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
COMPLETION = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 16\r\n\r\n" + b'{"prompt":"fox"}'


@dataclass
class Full:
    """A server whose ordinary connections are taken."""

    served: Served
    kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]

    async def opened(self, text: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """One more connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.served.port)
        writer.write(text)
        return reader, writer

    async def ask(self, text: bytes = b"") -> tuple[bytes, bytes]:
        """Over one more connection, which ends with the answer: head and body."""
        reader, writer = await self.opened(text)
        async with asyncio.timeout(60.0):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return head, body


@asynccontextmanager
async def full(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Full]:
    monkeypatch.setattr(listening.resource, "getrlimit", lambda _: (MOST / listening.SHARE, 4096))
    async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
        kept = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(MOST)]
        for reader, writer in kept:
            writer.write(HEALTH)
            assert b"200 OK" in await reader.readuntil(b"}")
        try:
            yield Full(served, kept)
        finally:
            for _, writer in kept:
                writer.close()


def is_refusal(head: bytes, body: bytes) -> bool:
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"\r\nretry-after: 1\r\n" in head
    assert b"\r\nconnection: close" in head
    assert json.loads(body)["error"]["type"] == Unavailable.kind
    return "too many connections" in json.loads(body)["error"]["message"]


@pytest.mark.usefixtures("own_log")
def test_connections_beyond_a_share_of_the_descriptors_are_refused_and_others_live_on(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with full(tokenizer, monkeypatch) as server:
            for _ in range(20):
                assert is_refusal(*await server.ask(COMPLETION))
            assert server.served.num_refused() == 20
            for reader, writer in server.kept:
                writer.write(HEALTH)
                assert b"200 OK" in await reader.readuntil(b"}")
            server.kept[0][1].close()
            async with asyncio.timeout(60.0), httpx.AsyncClient(base_url=server.served.http) as http:
                while (await http.post("/v1/completions", json={"prompt": "fox"})).status_code != 200:
                    await asyncio.sleep(0.01)

    run(check())
    assert [record.message for record in caplog.records] == [
        "10 HTTP connections are open, as many as 40% of this process's descriptors: others are refused, but for probes"
    ]


def test_a_full_server_still_answers_its_probes(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with full(tokenizer, monkeypatch) as server:
            for path in (b"/health", b"/ready", b"/metrics", b"/version", b"/debug/state"):
                head, body = await server.ask(HEALTH.replace(b"/health", path))
                assert head.startswith(b"HTTP/1.1 200 OK\r\n"), path
                assert b"\r\nconnection: close" in head
                assert body
            assert server.served.num_refused() == 0

    run(check())


def test_a_spare_connection_that_asks_nothing_makes_room_for_a_probe(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "SPARE_TIMEOUT_S", 3.0)

    async def check() -> None:
        async with full(tokenizer, monkeypatch) as server:
            idle, writer = await server.opened()
            assert is_refusal(*await server.ask(HEALTH))  # there was one to spare
            async with asyncio.timeout(60.0):
                head, _, body = (await idle.read()).partition(b"\r\n\r\n")
            assert is_refusal(head, body)
            assert server.served.num_refused() == 2
            writer.close()
            head, _ = await server.ask(HEALTH)
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")

    run(check())


@pytest.mark.parametrize("limit", [256, 1024, 2**20])
def test_both_ports_together_leave_descriptors_for_links_to_workers(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(listening.resource, "getrlimit", lambda _: (limit, limit))
    most = listening.most_connections()
    assert most is not None
    assert limit - 2 * most - min(MOST_SPARE, SPARE_SHARE * most) > limit / 10


@pytest.mark.parametrize("limit", [listening.resource.RLIM_INFINITY, 2**32])
def test_no_limit_is_told_to_grpc_that_it_cannot_count_to(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(listening.resource, "getrlimit", lambda _: (limit, limit))
    assert listening.most_connections() is None
