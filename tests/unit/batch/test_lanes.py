"""The connections of a batch to its server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpcore
import httpx
import pytest

from jdisagg.batch.__main__ import main
from jdisagg.batch.lanes import Lanes
from tests.unit.batch.fake_server import HANGS_UP, serving


def test_a_request_looks_at_no_connection_but_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    has_expired = httpcore.AsyncHTTPConnection.has_expired

    def counted(connection: httpcore.AsyncHTTPConnection) -> bool:
        nonlocal looks
        looks += 1
        return has_expired(connection)

    monkeypatch.setattr(httpcore.AsyncHTTPConnection, "has_expired", counted)
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"prompt": "p{i}"}}\n' for i in range(200)))
    with serving(together=40) as server:
        command = ["--input", str(source), "--output", str(tmp_path / "out.jsonl"), "--server", server.url, "--quiet"]
        assert main([*command, "--max-concurrency", "40"]) == 0
        assert server.most_at_once == 40
    assert looks <= 4 * 201


def test_connections_are_used_again_and_closed_at_the_end() -> None:
    async def body() -> None:
        async with httpx.AsyncClient(transport=Lanes(), base_url=server.url) as client:
            for _ in range(3):
                await asyncio.gather(*(client.post("/v1/completions", json={"prompt": "p", "seed": i}) for i in range(5)))
                assert len(server.open) <= 5
        for _ in range(1000):
            if not server.open:
                break
            await asyncio.sleep(0.01)

    with serving() as server:
        asyncio.run(body())
        assert not server.open


def test_an_answer_is_what_a_client_of_its_own_would_get() -> None:
    """With its status; and after a hang-up the next one comes on another connection."""

    async def body() -> None:
        async with httpx.AsyncClient(transport=Lanes(), base_url=server.url) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post("/v1/completions", json={"prompt": "gone", "seed": 1})
            response = await client.post("/v1/completions", json={"prompt": "odd", "seed": 1})
            assert (response.status_code, response.json()) == (418, {"a": 1})

    with serving(odd={"gone": (HANGS_UP, b""), "odd": (418, b'{"a": 1}')}) as server:
        asyncio.run(body())
