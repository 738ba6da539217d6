"""No thread is left, for a moment: what is read then fails, and whatever is read later comes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic

import grpc
import pytest
from chaos_kit.proxy import Weather

from jdisagg.api.peer.blocking_channels import BlockingChannels
from jdisagg.api.peer.byte_source import GrpcByteSource
from jdisagg.core.errors import Stalled
from tests.unit.reading import read_whole
from tests.unit.wire.peers import Prefill
from tests.unit.wire.rig import identity, run_quiet
from tests.unit.wire.test_swallowed import watched_reads

LONG_S = 80.0
NO_THREAD = "can't start new thread"


@contextmanager
def shortage(of: Callable[[threading.Thread], bool]) -> Iterator[None]:
    start = threading.Thread.start

    def start_or_not(thread: threading.Thread) -> None:
        if of(thread):
            raise RuntimeError(NO_THREAD)
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_or_not)
        yield


@asynccontextmanager
async def reader() -> AsyncIterator[tuple[GrpcByteSource, str, Callable[[], bytes]]]:
    """A source, the address of a P, and what reads a piece from there; in the end it closes at once."""
    p, source = Prefill(identity()), GrpcByteSource()
    p.pieces["k"] = b"bytes"
    address = await p.start()
    yield source, address, lambda: read_whole(source, address, "k", monotonic() + LONG_S)
    async with asyncio.timeout(LONG_S / 4):
        await asyncio.to_thread(source.close)
    await p.server.stop(0)


def test_a_channel_whose_call_got_no_thread_is_not_used_again_and_holds_up_nobody() -> None:
    """gRPC counts on the thread that it could not start: the channel's later calls, its close and its end would wait for it,
    whatever their deadline."""

    async def body() -> None:
        async with reader() as (source, address, read):
            assert await asyncio.to_thread(read) == b"bytes"
            starved = shortage(lambda thread: not thread.name.startswith("asyncio"))
            with starved, pytest.raises(ConnectionError, match=NO_THREAD):
                await asyncio.to_thread(read)
            async with asyncio.timeout(LONG_S / 4):
                assert await asyncio.to_thread(read) == b"bytes"
                await asyncio.to_thread(source.drop, address)

    run_quiet(body())


def test_however_many_reads_find_no_thread_one_channel_is_lost_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a descriptor for good: a shortage of threads that lasted would become one of descriptors, which nothing ends."""
    lost, abandon = list[grpc.Channel](), BlockingChannels.abandon

    def noted(channels: BlockingChannels, peer: str, channel: grpc.Channel) -> None:
        lost.append(channel)
        abandon(channels, peer, channel)

    monkeypatch.setattr(BlockingChannels, "abandon", noted)

    async def body() -> None:
        async with reader() as (_, _, read):
            for num_lost in (1, 2):
                assert await asyncio.to_thread(read) == b"bytes"
                with shortage(lambda thread: not thread.name.startswith("asyncio")):
                    for _ in range(5):
                        with pytest.raises(ConnectionError, match=NO_THREAD):
                            await asyncio.to_thread(read)
                assert len(lost) == num_lost, "a shortage each"
            assert await asyncio.to_thread(read) == b"bytes"

    run_quiet(body())


def test_reads_are_watched_again_once_there_is_a_thread_for_that() -> None:
    async def body() -> None:
        async with watched_reads() as (proxy, read):
            with shortage(lambda thread: thread.name == "stall-watch"), pytest.raises(ConnectionError, match=NO_THREAD):
                await asyncio.to_thread(read)
            assert await asyncio.to_thread(read) == b"bytes"
            proxy.set_weather(Weather.BLACK_HOLE)
            began_s = monotonic()
            with pytest.raises(Stalled):
                await asyncio.to_thread(read)
            assert monotonic() - began_s < LONG_S / 4

    run_quiet(body())
