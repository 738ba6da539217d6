"""The connections of a batch to its server."""

from __future__ import annotations

import asyncio
import gzip
import socket
import sys
from pathlib import Path

import httpcore
import httpx
import pytest

from jdisagg.batch.__main__ import main
from jdisagg.batch.lanes import Lanes, proxy_of
from tests.unit.batch.fake_server import HANGS_UP, FakeServer, serving

ESTABLISHED = "01"  # as the kernel writes it


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


def test_whether_the_server_s_host_is_there_is_asked_while_an_answer_is_computed() -> None:
    """By the kernel, which shows the timer of a connection that waits for nothing else: 02 is that of keepalive."""

    async def body() -> None:
        async with httpx.AsyncClient(transport=Lanes(), base_url=server.url, timeout=60.0) as client:
            asked = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "p", "seed": 1}))
            while not server.at_once:
                await asyncio.sleep(0.01)
            for _ in range(1000):  # what was sent may not be acknowledged yet
                if (timers := timers_of(server)) == ["02"]:
                    break
                await asyncio.sleep(0.01)
            assert timers == ["02"]
            server.were_together.set()
            assert (await asked).status_code == 200

    with serving(together=2) as server:
        asyncio.run(body())


def timers_of(server: FakeServer) -> list[str]:
    """Of the connections to it, as the kernel calls them."""
    rows = [row.split() for row in Path("/proc/self/net/tcp").read_text("ascii").splitlines()[1:]]
    to_server = [row for row in rows if int(row[2].rpartition(":")[2], 16) == server.server_address[1]]
    established = [row for row in to_server if row[3] == ESTABLISHED]  # the port may have been another server's before
    return [row[5].partition(":")[0] for row in established]


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


def test_an_answer_that_comes_compressed_and_in_pieces_is_whole() -> None:
    packed = gzip.compress(b'{"text": "whole"}')
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (packed[:9], packed[9:], b""))
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + pieces)
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, httpx.AsyncClient(transport=Lanes(), base_url=url) as client:
            assert (await client.get("/")).json() == {"text": "whole"}

    asyncio.run(body())


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.usefixtures("no_proxies")
@pytest.mark.parametrize(
    ("environ", "url", "proxy"),
    [
        ({}, "http://box:1", None),
        ({"http_proxy": "http://name:secret@gate:3128"}, "http://box:1", "gate:3128"),
        ({"http_proxy": "gate:3128"}, "http://name:secret@box:1/api", "gate:3128"),
        ({"http_proxy": "http://gate:3128"}, "https://box", None),
        ({"HTTPS_PROXY": "http://gate:3128"}, "https://box", "gate:3128"),
        ({"all_proxy": "socks5://gate:9"}, "http://box:1", "gate:9"),
        ({"http_proxy": "http://gate:3128", "no_proxy": "localhost,box"}, "http://box:1", None),
        ({"http_proxy": "http://gate:3128", "no_proxy": "box"}, "http://name:secret@box:1", None),
        ({"http_proxy": "http://gate:3128", "no_proxy": "127.0.0.1"}, "http://127.0.0.1:1", None),
    ],
)
def test_the_proxy_of_the_environment_is_known_without_its_password(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], url: str, proxy: str | None
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert proxy_of(url) == proxy


@pytest.mark.usefixtures("no_proxies")
def test_a_batch_says_that_a_proxy_is_between_it_and_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which may be why a server of this machine is not reached."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    with socket.socket() as taken, serving() as server:
        taken.bind(("127.0.0.1", 0))  # nobody listens there, nor will
        gate = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("http_proxy", f"http://{gate}")
        command = ["--input", str(source), "--output", str(tmp_path / "out.jsonl"), "--server", server.url]
        assert main([*command, "--patience-s", "0"]) == 1
        said = f"jdisagg.batch: the server is asked through the environment's proxy {gate}; no_proxy names hosts"
        assert capsys.readouterr().err.startswith(said)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert main(command) == 0
        assert capsys.readouterr().err == "jdisagg.batch: 1 ok, 0 failed\n"


@pytest.mark.usefixtures("no_proxies")
@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "gate://127.0.0.1:9", "http://gate:port", "http://[::1"])
def test_a_proxy_of_a_kind_that_is_not_served_is_a_command_that_cannot_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], proxy: str
) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    monkeypatch.setenv("all_proxy", proxy)
    assert main(["--input", str(source), "--output", str(tmp_path / "out.jsonl"), "--server", "http://127.0.0.1:9"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("jdisagg.batch: proxies of the environment: ")
    assert said.endswith("; choose an HTTP one, or none with no_proxy='*'")
