"""What HTTP allows and few clients send."""

from __future__ import annotations

import asyncio
import json

import pytest

from jdisagg.api.http import protocol
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

BODY = b'{"prompt": "the"}'
OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAA\r\n"
WHOLE = b"content-length: 17\r\n\r\n" + BODY
CHUNKED = b"transfer-encoding: chunked\r\n\r\n8\r\n" + BODY[:8] + b"\r\n9\r\n" + BODY[8:] + b"\r\n0\r\n\r\n"


@pytest.mark.usefixtures("own_log")
@pytest.mark.parametrize("pieces", [1, 2, 40], ids=["at once", "head and body", "byte by byte"])
@pytest.mark.parametrize("content", [WHOLE, CHUNKED], ids=["length", "chunked"])
def test_a_request_that_offers_http_2_is_answered_in_http_1(
    tokenizer: Tokenizer, content: bytes, pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Java's client offers it with each request of its default settings."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    offered = head + OFFER + content
    ends = {1: [len(offered)], 2: [offered.index(b"\r\n\r\n") + 4, len(offered)], 40: list(range(1, len(offered) + 1))}[pieces]

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            for begin, end in zip([0, *ends], ends, strict=False):
                writer.write(offered[begin:end])
                await writer.drain()
                await asyncio.sleep(0.001)
            writer.write(offered + head + content)  # the connection goes on
            got = b""
            async with asyncio.timeout(60.0):
                while got.count(b'"text":"fox"') < 3:
                    part = await reader.read(65536)
                    assert part, f"ended after {got!r}"
                    got += part
            assert got.count(b"HTTP/1.1 200 OK") == 3
            writer.close()

    run(check())
    assert not caplog.records


def test_thousands_of_offers_at_once_are_answered(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write((b"GET /health HTTP/1.1\r\nhost: x\r\n" + OFFER + b"\r\n") * 2000)
            got = 0
            async with asyncio.timeout(60.0):
                while got < 2000:
                    got += (await reader.readuntil(b'{"status":"ok"}')).count(b"200 OK")
            writer.close()

    run(check())


def test_a_tunnel_is_refused(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            for target in (b"example.com:443", b"/v1/completions"):
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
                writer.write(b"CONNECT %s HTTP/1.1\r\nhost: example.com\r\n\r\n" % target)
                async with asyncio.timeout(60.0):
                    assert (await reader.readline()).startswith(b"HTTP/1.1 40")
                writer.close()

    run(check())


@pytest.mark.parametrize("late", [b"}", b"\r\n"], ids=["rest of a body", "empty line"])
def test_a_connection_on_which_something_came_behind_its_answer_ends_nevertheless(
    tokenizer: Tokenizer, late: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEADER_TIMEOUT_S", 1.0)
    length = b"content-length: 3\r\n\r\n{" if late == b"}" else b"\r\n"

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(b"POST /nowhere HTTP/1.1\r\nhost: x\r\n" + length)
            async with asyncio.timeout(60.0):
                assert b"404" in await reader.readuntil(b"}")
                writer.write(late)
                assert b"HTTP" not in await reader.read()
            writer.close()

    run(check())


@pytest.mark.usefixtures("own_log")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_a_client_that_goes_away_with_requests_behind_the_first_cancels_it(
    tokenizer: Tokenizer, stream: bool, apart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    asked = b'{"prompt": "the", "stream": %s}' % (b"true" if stream else b"false")
    one = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(asked), asked)
    engine = FakeEngine(tokenizer, "the quick brown fox " * 4)
    engine.delay_s = 0.1

    async def check() -> None:
        async with serving(engine, tokenizer) as served:
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            for part in (one, one, one) if apart else (one * 3,):
                writer.write(part)
                await asyncio.sleep(0.05)
            async with asyncio.timeout(60.0):
                while not engine.live:
                    await asyncio.sleep(0.005)
            writer.close()
            async with asyncio.timeout(60.0):
                while engine.live:
                    await asyncio.sleep(0.005)
            await asyncio.sleep(0.1)
            assert len(engine.requests) == len(engine.cancelled) == 1

    run(check())
    assert not caplog.records


async def refused(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, part: bytes) -> None:
    """Send piece after piece until the server has enough of it."""
    answer = asyncio.create_task(reader.readuntil(b"}}"))
    num_sent = 0
    while not answer.done():
        writer.write(part)
        num_sent += len(part)
        assert num_sent < 2**20
        await asyncio.sleep(0.01)
    status, told = parted(await answer)
    assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
    assert told == "the headers have more than 65536 bytes; send shorter or fewer ones"


def parted(answer: bytes) -> tuple[bytes, str]:
    """Status line and message of a refusal as every other one is, after which the connection ends."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *headers = head.split(b"\r\n")
    assert {b"content-type: application/json", b"connection: close", b"content-length: %d" % len(body)} <= {*headers}
    error = json.loads(body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, None)
    return status, error["message"]


@pytest.mark.parametrize("begin", [b"GET /", b"GET / HTTP/1.1\r\nhost: x\r\na: "], ids=["first line", "header"])
def test_headers_without_an_end_are_not_collected(tokenizer: Tokenizer, begin: bytes) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"a" * 50_000 + b"\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"}")
            writer.write(begin)
            async with asyncio.timeout(60.0):
                await refused(reader, writer, b"a" * 2**12)
            writer.transport.abort()

    run(check())


@pytest.mark.parametrize("where", ["headers", "trailers"])
@pytest.mark.parametrize(("num", "status"), [(200, b"200 OK"), (201, b"431 Request Header Fields Too L"), (2000, b"431 ")])
def test_more_headers_or_trailers_than_anybody_sends_are_refused_before_the_rest_is_read(
    tokenizer: Tokenizer, where: str, num: int, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    noting = protocol.Protocol.on_header

    def note(one: protocol.Protocol, name: bytes, value: bytes) -> None:
        seen.append(name)
        noting(one, name, value)

    monkeypatch.setattr(protocol.Protocol, "on_header", note)
    if where == "headers":
        asked = b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * num + b"\r\n"
    else:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        asked = head + b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY) + b"a: b\r\n" * num + b"\r\n"

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(asked)
            async with asyncio.timeout(60.0):
                if num > 200:
                    line, told = parted(await reader.read())
                    assert status in line
                    assert told == "there are more than 200 headers; send fewer"
                else:
                    assert status in await reader.readline()
            writer.transport.abort()

    run(check())
    assert len(seen) <= 203


def test_what_is_no_http_is_refused_as_everything_else_is(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")  # a client that speaks TLS
            async with asyncio.timeout(60.0):
                status, told = parted(await reader.read())
            assert (status, told) == (b"HTTP/1.1 400 Bad Request", "Invalid HTTP request received.")
            writer.close()

    run(check())


@pytest.mark.parametrize("part", [b"a" * 2**12, b"a: %s\r\n" % (b"b" * 2**12)], ids=["one", "many"])
def test_trailers_without_an_end_are_not_collected(tokenizer: Tokenizer, part: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            chunks = b"%x\r\n%s\r\n1\r\n}\r\n" % (2_000_016, BODY[:-1] + b" " * 2_000_000)
            writer.write(head + chunks + b"0\r\na: " + b"a" * 50_000 + b"\r\n\r\n")
            async with asyncio.timeout(60.0):
                assert b'"text":"fox"' in await reader.readuntil(b"}}}")
                writer.write(head + chunks + b"0\r\na: ")
                await refused(reader, writer, part)
            writer.transport.abort()

    run(check())


def test_the_rest_of_a_long_body_and_many_requests_are_no_long_headers(tokenizer: Tokenizer) -> None:
    health = b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"a" * 60_000 + b"\r\n\r\n"

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\n\r\n")
            async with asyncio.timeout(60.0):
                assert b"404" in await reader.readuntil(b"}}")
                writer.write(b"a" * 3_000_000 + health[:1000])
                for _ in range(50):
                    await writer.drain()
                    writer.write(health[1000:] + health[:1000])
                    assert b"200 OK" in await reader.readuntil(b"}")
            writer.transport.abort()

    run(check())


@pytest.mark.parametrize("line_ends", [b"\n\n", b"\n\r\n", b"\r\n\n", b"\r\r"])
def test_a_request_without_its_two_cr_is_none(tokenizer: Tokenizer, line_ends: bytes) -> None:
    """By those it is seen where there may be many."""

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(b"GET /health HTTP/1.1" + line_ends + b"GET /health HTTP/1.1\r\n\r\n")
            async with asyncio.timeout(60.0):
                assert parted(await reader.read())[0] == b"HTTP/1.1 400 Bad Request"
            writer.close()

    run(check())


class Noted:
    """How many requests stood behind the one that is answered, at most; and the pieces that were parsed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most_behind = 0
        self.pieces: list[int] = []
        begin, parse = protocol.Protocol.on_headers_complete, protocol.Protocol._parse_piece

        def note(one: protocol.Protocol) -> None:
            begin(one)
            self.most_behind = max(self.most_behind, len(one.pipeline))

        def note_piece(one: protocol.Protocol, data: bytes) -> None:
            self.pieces.append(len(data))
            parse(one, data)

        monkeypatch.setattr(protocol.Protocol, "on_headers_complete", note)
        monkeypatch.setattr(protocol.Protocol, "_parse_piece", note_piece)


def test_of_thousands_of_requests_at_once_few_are_parsed_before_the_first_is_answered(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(monkeypatch)
    longest_behind = protocol.MOST_BEHIND + protocol.PIECE_BYTES // len(b"GET / HTTP/1.1\r\n\r\n") + 1

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(b"".join(b"GET /%04d HTTP/1.1\r\nx-request-id: r%04d\r\n\r\n" % (i, i) for i in range(5000)))
            writer.write(b"POST /v1/completions HTTP/1.1\r\n" + WHOLE)
            async with asyncio.timeout(60.0):
                for number in range(5000):
                    answer = await reader.readuntil(b"}}")
                    assert b" 404 " in answer
                    assert b"x-request-id: r%04d\r\n" % number in answer
                assert b'"text":"fox"' in await reader.readuntil(b"}}}")
            writer.close()

    run(check())
    assert protocol.MOST_BEHIND <= noted.most_behind <= longest_behind


def test_behind_a_full_pipeline_no_more_is_read_than_one_piece_whoever_waits_for_the_client(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0
    take = protocol.Protocol.data_received

    def note(one: protocol.Protocol, data: bytes) -> None:
        nonlocal read
        read += len(data)
        take(one, data)

    monkeypatch.setattr(protocol.Protocol, "data_received", note)
    engine = FakeEngine(tokenizer, "the quick brown fox " * 4)
    engine.delay_s = 0.05

    async def check() -> None:
        async with serving(engine, tokenizer) as served:
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            one = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + WHOLE
            writer.write(one * (2**24 // len(one)))
            async with asyncio.timeout(60.0):
                while len(engine.requests) < 3:
                    await asyncio.sleep(0.01)
            writer.transport.abort()

    run(check())
    assert read <= 2**20


@pytest.mark.parametrize("content", ["length", "chunked"])
def test_a_large_body_is_not_cut_for_that_it_has_lines(
    tokenizer: Tokenizer, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(monkeypatch)
    body = json.dumps({"prompt": "the", "user": ["a"] * 2**16}, indent=2).encode()
    length = b"content-length: %d\r\n\r\n" % len(body) if content == "length" else b"transfer-encoding: chunked\r\n\r\n"
    sent = body if content == "length" else b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(b"POST /nowhere HTTP/1.1\r\nhost: x\r\n" + length + sent + b"GET /health HTTP/1.1\r\n\r\n")
            async with asyncio.timeout(60.0):
                assert b"404" in await reader.readuntil(b"}}")
                assert b"200 OK" in await reader.readuntil(b"}")
            writer.close()

    run(check())
    assert sum(noted.pieces) > len(body)
    assert len(noted.pieces) < len(body) / 2**13


def test_many_requests_at_once_on_one_connection_are_answered_in_order(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            for number in range(100):
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nx-request-id: r%d\r\n\r\n" % number)
                await asyncio.sleep(0)
            async with asyncio.timeout(60.0):
                for number in range(100):
                    assert b"x-request-id: r%d\r\n" % number in await reader.readuntil(b"}")
            writer.close()

    run(check())
