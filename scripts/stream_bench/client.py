"""The client process: opens streams, keeps what comes as it comes, and looks at it when the window is over."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection

import grpc.aio
import uvloop
from bench_kit.child import START_S
from bench_kit.figures import quantile

from jdisagg.v1 import common_pb2, generation_pb2
from stream_bench.parts import HOST, MAX_TOKENS, TOKEN_CHARACTERS, Kind, Phase, Seen, cpu_s, spelled

PROMPT = "one two three"
SETTLE_S = 0.5
LEAST_PIECES = 3  # of each stream within a window: there are gaps between chunks then
_EVENT = re.compile(rb"data: ([^\n]+)\n\n")
_TEXT = re.compile(rb'"(?:text|content)":"([^"]*)"')


@dataclass(slots=True)
class Stream:
    """What one stream brought: bytes, and when they came."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    error: str = ""

    def take(self, data: bytes) -> None:
        """Note it."""
        self.pieces.append((time.monotonic(), data))
        if not self.begun.is_set():
            self.begun.set()


@dataclass(frozen=True, slots=True)
class Chunk:
    """One that brought text."""

    at_s: float
    text: str
    data: bytes


class _Connection(asyncio.Protocol):
    def __init__(self, stream: Stream, request: bytes) -> None:
        self._stream = stream
        self._request = request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as TCP brings it
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._stream.take(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream.error = f"the server hung up: {exc}"


def run_client(pipe: Connection) -> None:
    """The process's main: says that it is there; then answers each Phase with what was Seen, or an Exception."""
    pipe.send(True)
    while True:
        phase = pipe.recv()
        try:
            pipe.send(uvloop.run(_look(phase)))
        except (RuntimeError, OSError, AssertionError, grpc.aio.AioRpcError, TimeoutError) as error:
            pipe.send(RuntimeError(f"{phase.kind.name}: {error!r}"))


async def _look(phase: Phase) -> Seen:
    streams = [Stream() for _ in range(phase.num_streams)]
    opener = _open_grpc if phase.kind.api == "grpc" else _open_http
    close = await opener(phase, streams)
    try:
        async with asyncio.timeout(START_S):
            await asyncio.gather(*(stream.begun.wait() for stream in streams))
        await asyncio.sleep(SETTLE_S)
        had = [len(stream.pieces) for stream in streams]
        before, began_s = [cpu_s(pid) for pid in phase.pids], time.monotonic()
        await asyncio.sleep(phase.window_s)
        await _until_each_brought(LEAST_PIECES, streams, had)
        spent, ended_s = [cpu_s(pid) for pid in phase.pids], time.monotonic()
    finally:
        errors = [stream.error for stream in streams if stream.error]
        await close()
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(streams)} streams failed: {errors[0]}")
    used = tuple(after - earlier for after, earlier in zip(spent, before, strict=True))
    read = _read_messages if phase.kind.api == "grpc" else _read_events
    return _seen([read(stream) for stream in streams], began_s, ended_s, used, phase.checks_text)


async def _until_each_brought(count: int, streams: list[Stream], had: list[int]) -> None:
    """So many pieces more than it had; one that fails brings none. The window is longer where a process stands still in it."""
    async with asyncio.timeout(START_S):
        while any(len(one.pieces) < before + count and not one.error for one, before in zip(streams, had, strict=True)):
            await asyncio.sleep(0.05)


def _seen(streams: list[list[Chunk]], began_s: float, ended_s: float, used: tuple[float, ...], checks_text: bool) -> Seen:
    inside, gaps = list[Chunk](), list[float]()
    for chunks in streams:
        if checks_text:
            text = "".join(chunk.text for chunk in chunks)
            assert text == spelled(len(text) // TOKEN_CHARACTERS), "a stream has other text than the tokens made up"
        mine = [chunk for chunk in chunks if began_s <= chunk.at_s < ended_s]
        gaps += [after.at_s - before.at_s for before, after in pairwise(mine)]
        inside += mine
    assert gaps, "no stream brought two chunks within the window"
    return Seen(
        seconds=ended_s - began_s,
        num_tokens=sum(len(chunk.text) for chunk in inside) // TOKEN_CHARACTERS,
        num_chunks=len(inside),
        num_bytes=sum(len(chunk.data) for chunk in inside),
        cpu_s=used,
        gap_p50_s=quantile(gaps, 0.5),
        gap_p99_s=quantile(gaps, 0.99),
        sample=min((chunk.data for chunk in inside), key=len),
    )


# --- HTTP


async def _open_http(phase: Phase, streams: list[Stream]):
    loop, (host, _, port) = asyncio.get_running_loop(), phase.address.rpartition(":")
    request = _http_request(phase.kind)
    transports = [
        (await loop.create_connection(lambda stream=stream: _Connection(stream, request), host, int(port)))[0]
        for stream in streams
    ]

    async def close() -> None:
        for transport in transports:
            transport.abort()
        await asyncio.sleep(0.1)

    return close


def _http_request(kind: Kind) -> bytes:
    body: dict[str, object] = {"model": "demo", "max_tokens": MAX_TOKENS, "stream": True, "temperature": 0, "ignore_eos": True}
    if kind.api == "chat":
        body |= {"messages": [{"role": "user", "content": PROMPT}]}
        body |= {"logprobs": True, "top_logprobs": kind.num_top} if kind.logprobs else {}
    else:
        body |= {"prompt": PROMPT} | ({"logprobs": kind.num_top} if kind.logprobs else {})
    path, content = "/v1/chat/completions" if kind.api == "chat" else "/v1/completions", json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def _read_events(stream: Stream) -> list[Chunk]:
    """An event may lie in several pieces; it came with the last of them."""
    chunks, text, ends = list[Chunk](), b"".join(data for _, data in stream.pieces), list[tuple[int, float]]()
    for at_s, data in stream.pieces:
        ends.append(((ends[-1][0] if ends else 0) + len(data), at_s))
    if not text.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"answered {text[:200]!r}")
    number = 0
    for event in _EVENT.finditer(text):
        while ends[number][0] < event.end():
            number += 1
        found = _TEXT.search(event[1])
        if found is not None and found[1]:
            chunks.append(Chunk(ends[number][1], found[1].decode(), event[0]))
    return chunks


# --- gRPC


async def _open_grpc(phase: Phase, streams: list[Stream]):
    channel = grpc.aio.insecure_channel(phase.address, options=[("grpc.use_local_subchannel_pool", 1)])
    method = channel.unary_stream("/jdisagg.v1.GenerationService/Generate")
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=phase.kind.num_top)
    request = generation_pb2.GenerateRequest(text=PROMPT, sampling=sampling).SerializeToString()
    tasks = [asyncio.create_task(_take_messages(method(request, timeout=START_S + phase.window_s + 60), s)) for s in streams]

    async def close() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await channel.close()

    return close


async def _take_messages(call: grpc.aio.UnaryStreamCall, stream: Stream) -> None:
    try:
        async for message in call:
            stream.take(message)
        stream.error = "the stream ended"
    except grpc.aio.AioRpcError as error:
        stream.error = f"{error.code().name}: {error.details()}"
    finally:
        stream.begun.set()


def _read_messages(stream: Stream) -> list[Chunk]:
    chunks = []
    for at_s, data in stream.pieces:
        text = generation_pb2.GenerateResponse.FromString(data).delta.text
        if text:
            chunks.append(Chunk(at_s, text, data))
    return chunks
