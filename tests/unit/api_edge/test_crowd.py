"""More connections than a process has descriptors for."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from jdisagg.api import listening
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

MOST = 10


def test_connections_beyond_a_share_of_the_descriptors_are_refused_and_others_live_on(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening.resource, "getrlimit", lambda _: (MOST / listening.SHARE, 4096))

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            kept = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(MOST)]
            for reader, writer in kept:
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert b"200 OK" in await reader.readuntil(b"}")
            for _ in range(20):
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
                async with asyncio.timeout(60.0):
                    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
                assert b"\r\nretry-after: 1" in head
                assert "too many connections" in json.loads(body)["error"]["message"]
                writer.close()
            for reader, writer in kept:
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert b"200 OK" in await reader.readuntil(b"}")
            for _, writer in kept[:1]:
                writer.close()
            async with asyncio.timeout(60.0), httpx.AsyncClient(base_url=served.http) as http:
                while (await http.get("/health")).status_code != 200:
                    await asyncio.sleep(0.01)
            for _, writer in kept:
                writer.close()

    run(check())
    assert [record.message for record in caplog.records] == [
        "10 HTTP connections are open, as many as 75% of this process's descriptors: others are refused"
    ]


@pytest.mark.parametrize("limit", [listening.resource.RLIM_INFINITY, 2**32])
def test_no_limit_is_told_to_grpc_that_it_cannot_count_to(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(listening.resource, "getrlimit", lambda _: (limit, limit))
    assert listening.most_connections() is None
