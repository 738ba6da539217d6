"""A connection that stays open while nothing passes any more: bytes are not waited for on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic

import pytest
from chaos_kit.proxy import Proxy, Weather

from jdisagg.api.peer.byte_source import SLOW_PART_BYTES, GrpcByteSource
from jdisagg.api.peer.client import GrpcPeerClient
from jdisagg.core.errors import Stalled
from jdisagg.handoff.events import FromPrefill
from jdisagg.handoff.messages import Accepted, HandoffId, StreamEnded
from tests.unit.reading import read_whole
from tests.unit.wire.peers import Prefill, opening
from tests.unit.wire.rig import FAST, identity, run_quiet, until

H = HandoffId("r", 1)
LONG_S = 60.0


def test_a_read_ends_as_its_hand_off_does_when_their_peer_falls_silent_and_the_next_one_takes_a_new_connection() -> None:
    async def body() -> None:
        p, events, source = Prefill(identity()), list[FromPrefill](), GrpcByteSource(stall_s=FAST.dead_after_s)
        p.pieces["k"] = b"bytes"
        proxy = await Proxy(lambda *_: None).start()
        proxy.target_port = int((await p.start()).rpartition(":")[2])
        address = f"127.0.0.1:{proxy.port}"
        loop = asyncio.get_running_loop()
        client = GrpcPeerClient(identity(epoch="d"), loop=loop, post=events.append, config=FAST)

        def read() -> bytes:
            return read_whole(source, address, "k", monotonic() + LONG_S)

        assert await asyncio.to_thread(read) == b"bytes"
        client.open(address, H, opening())
        await until(p.opened)
        p.opened()[0].reply.send(Accepted(cached_tokens=0))
        await until(lambda: events)
        proxy.set_weather(Weather.BLACK_HOLE)
        began_s = monotonic()
        with pytest.raises(Stalled, match=address):
            await asyncio.to_thread(read)
        await until(lambda: isinstance(events[-1].message, StreamEnded))
        assert monotonic() - began_s < LONG_S / 4
        proxy.set_weather(Weather.CLEAR)
        assert await asyncio.to_thread(read) == b"bytes"
        await client.aclose()
        source.close()
        await proxy.close()
        await p.server.stop(0)

    run_quiet(body())


STALL_S = 0.4


@asynccontextmanager
async def watched_reads() -> AsyncIterator[tuple[Proxy, Callable[[], bytes]]]:
    """What stands between P and a source that gives up after STALL_S, and a read of five bytes through it."""
    p, source = Prefill(identity()), GrpcByteSource(stall_s=STALL_S)
    p.pieces["k"] = b"bytes"
    proxy = await Proxy(lambda *_: None).start()
    proxy.target_port = int((await p.start()).rpartition(":")[2])
    yield proxy, lambda: read_whole(source, f"127.0.0.1:{proxy.port}", "k", monotonic() + LONG_S)
    source.close()
    await proxy.close()
    await p.server.stop(0)


def test_a_read_on_which_nothing_comes_ends_long_before_its_deadline_and_the_next_one_takes_a_new_connection() -> None:
    async def body() -> None:
        async with watched_reads() as (proxy, read):
            for _ in range(2):  # what has flowed again is watched again
                assert await asyncio.to_thread(read) == b"bytes"
                proxy.set_weather(Weather.BLACK_HOLE)
                began_s = monotonic()
                with pytest.raises(Stalled, match=f"nothing came for {STALL_S:g} s"):
                    await asyncio.to_thread(read)
                assert monotonic() - began_s < LONG_S / 4
                proxy.set_weather(Weather.CLEAR)
            assert await asyncio.to_thread(read) == b"bytes"
            await until(lambda: all(thread.name != "stall-watch" for thread in threading.enumerate()))

    run_quiet(body())


def test_what_is_slow_but_moves_arrives_the_second_time_in_small_parts() -> None:
    async def body() -> None:
        p, source = Prefill(identity()), GrpcByteSource(stall_s=STALL_S)
        p.pieces["k"] = bytes(2**18)
        proxy = await Proxy(lambda *_: None).start()
        proxy.target_port = int((await p.start()).rpartition(":")[2])
        proxy.slow_bytes_per_s = 2**18
        proxy.set_weather(Weather.SLOW)

        def read() -> list[int]:
            room = memoryview(bytearray(2**18))
            return list(source.read_into(f"127.0.0.1:{proxy.port}", "k", room, monotonic() + LONG_S))

        with pytest.raises(Stalled):
            await asyncio.to_thread(read)
        assert await asyncio.to_thread(read) == [SLOW_PART_BYTES] * (2**18 // SLOW_PART_BYTES)
        proxy.set_weather(Weather.CLEAR)
        assert await asyncio.to_thread(read) in ([2**18], [SLOW_PART_BYTES] * 4)
        assert await asyncio.to_thread(read) == [2**18], "as ever, once it has flowed without a pause"
        source.close()
        await proxy.close()
        await p.server.stop(0)

    run_quiet(body())


def test_a_connection_that_let_a_read_run_out_of_time_is_not_used_again() -> None:
    async def body() -> None:
        p, source = Prefill(identity()), GrpcByteSource()
        p.pieces["k"] = b"bytes"
        proxy = await Proxy(lambda *_: None).start()
        proxy.target_port = int((await p.start()).rpartition(":")[2])

        def read(left_s: float) -> bytes:
            return read_whole(source, f"127.0.0.1:{proxy.port}", "k", monotonic() + left_s)

        assert await asyncio.to_thread(read, LONG_S) == b"bytes"
        proxy.set_weather(Weather.BLACK_HOLE)
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(read, 0.3)
        proxy.set_weather(Weather.CLEAR)
        assert await asyncio.to_thread(read, LONG_S) == b"bytes"
        source.close()
        await proxy.close()
        await p.server.stop(0)

    run_quiet(body())
