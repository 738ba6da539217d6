"""What the logs of both sides say of hand-off streams and of peers: each thing once, and no storm of lines."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
from collections.abc import AsyncIterator
from time import monotonic
from typing import cast

import grpc
import pytest

from jdisagg.api import channels
from jdisagg.api.peer import server as peer_server
from jdisagg.api.peer.codec import encode_down
from jdisagg.api.tasks import cancel_and_wait
from jdisagg.v1 import peer_pb2, peer_pb2_grpc
from tests.unit.wire.peers import CHUNK, H1, H2, Decode, Prefill, beat, opened_by_hand, opening
from tests.unit.wire.rig import identity, run_quiet, until


@pytest.mark.parametrize(("dies", "why"), [(True, "the connection"), (False, "no heartbeat"), (None, "")])
def test_a_decode_worker_that_goes_in_the_middle_of_a_hand_off_is_in_the_prefill_worker_s_log(
    dies: bool | None, why: str, caplog: pytest.LogCaptureFixture
):
    """`dies`: None = it ends its stream in good order, which nobody needs to read of."""
    caplog.set_level(logging.INFO, "jdisagg.api.peer.server")

    async def body() -> None:
        p = Prefill(identity())
        address = await p.start()
        async with channels.open_channel(address) as channel:
            call = await opened_by_hand(peer_pb2_grpc.PeerServiceStub(channel), p, "r")
            if dies is None:
                await call.done_writing()
                assert await call.code() is grpc.StatusCode.OK
            elif dies:
                await channel.close()
            await until(p.ends)
        await p.server.stop(0)

    run_quiet(body())
    told = [record.getMessage() for record in caplog.records if record.name == "jdisagg.api.peer.server"]
    if dies is None:
        assert told == []
    else:
        (line,) = told
        assert line.startswith(f"request r of {identity().worker}: "), "and not a port that its operator never chose"
        assert why in line


def test_a_decode_worker_that_beats_and_does_not_read_is_in_the_log_as_such(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level(logging.INFO, "jdisagg.api.peer.server")
    monkeypatch.setattr(peer_server, "MOST_UNREAD", 4)
    monkeypatch.setattr(peer_server, "LAST_WRITE_S", 0.2)

    async def body() -> None:
        p = Prefill(identity())
        address = await p.start()
        async with channels.open_channel(address) as channel:
            call = await opened_by_hand(peer_pb2_grpc.PeerServiceStub(channel), p, "r")
            beats = asyncio.create_task(beat(call))
            p.opened()[0].reply.send(dataclasses.replace(CHUNK, locator="x" * 2**26))  # more than gRPC's window takes
            await asyncio.sleep(0.1)
            for _ in range(10):
                p.opened()[0].reply.send(CHUNK)
            await until(p.ends)
            assert p.ends() == ["unread"]
            await cancel_and_wait(beats)
        await p.server.stop(0)

    run_quiet(body())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "jdisagg.api.peer.server"]
    assert "its decode worker beats and leaves 4 messages unread" in line


def test_a_connection_that_is_gone_is_in_the_log_though_it_reads_as_an_end_in_good_order(caplog: pytest.LogCaptureFixture):
    """gRPC says both, and either may come first."""
    caplog.set_level(logging.INFO, "jdisagg.api.peer.server")
    gone = asyncio.Event()

    class Context:
        """Of a call to which P says nothing."""

        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        async def send_initial_metadata(self, _: object) -> None:
            pass

        async def write(self, message: peer_pb2.PrefillResponse) -> None:
            raise AssertionError(message)

    async def requests() -> AsyncIterator[peer_pb2.PrefillRequest]:
        yield encode_down(opening(), epoch=identity().epoch, now_s=monotonic())
        await gone.wait()

    async def body() -> None:
        p = Prefill(identity())
        handler = asyncio.create_task(p.service.Prefill(requests(), cast(grpc.aio.ServicerContext, Context())))
        await until(p.opened)
        gone.set()
        await until(p.ends)
        assert not handler.done()
        await cancel_and_wait(handler)

    run_quiet(body())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "jdisagg.api.peer.server"]
    assert line.startswith("request r of ipv4:127.0.0.1:1: the connection to its decode worker is gone")


def test_a_storm_of_streams_that_die_at_once_leaves_the_first_lines_in_the_log(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "jdisagg.api.peer.server")
    num_streams = 3 * peer_server.TOLD_FIRST

    async def body() -> None:
        p = Prefill(identity())
        address = await p.start()
        async with channels.open_channel(address) as channel:
            stub = peer_pb2_grpc.PeerServiceStub(channel)
            calls = [await opened_by_hand(stub, p, f"r{number}") for number in range(num_streams)]
            for call in calls:
                call.cancel()
            await until(lambda: len(p.ends()) == num_streams)
        await p.server.stop(0)

    run_quiet(body())
    told = [record.getMessage() for record in caplog.records if record.name == "jdisagg.api.peer.server"]
    assert len(told) == peer_server.TOLD_FIRST
    assert len(set(told)) == len(told)


def test_the_log_says_when_a_peer_that_was_down_is_there_and_does_not_pair(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    async def body() -> None:
        monkeypatch.setattr("jdisagg.api.peer.presence.PROBE_INTERVAL_S", 0.05)
        p, d = Prefill(identity()), Decode(identity(fingerprint="another"))
        address = await p.start()
        await p.server.stop(0)
        d.client.watch((address,))
        await until(lambda: "is down" in caplog.text)
        await p.start(port=int(address.rpartition(":")[2]))
        await until(lambda: "does not pair with us" in caplog.text)
        await asyncio.sleep(0.2)
        await p.server.stop(0)
        await until(lambda: caplog.text.count("is down") == 2)
        assert caplog.text.count("does not pair with us") == 1
        await d.client.aclose()

    run_quiet(body())


@pytest.mark.usefixtures("own_log")
def test_a_bug_that_ends_a_stream_is_in_the_log_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    async def buggy(*_: object) -> None:
        raise ValueError("a bug")

    async def body() -> None:
        d = Decode()
        monkeypatch.setattr(d.client, "_live", buggy)
        d.client.open("127.0.0.1:1", H1, opening())
        await until(lambda: d.ends(H1) == ["closed"])
        await asyncio.sleep(0)
        gc.collect()
        await d.client.aclose()

    run_quiet(body())
    assert [str(record.exc_info and record.exc_info[1]) for record in caplog.records if record.exc_info] == ["a bug"]


def test_a_bug_of_the_prefill_worker_in_reading_a_stream_is_in_its_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level(logging.INFO, "jdisagg.api.peer.server")

    def buggy(*_: object) -> None:
        raise ValueError("a bug")

    async def body() -> None:
        p = Prefill(identity())
        async with channels.open_channel(await p.start()) as channel:
            call = await opened_by_hand(peer_pb2_grpc.PeerServiceStub(channel), p, "r")
            monkeypatch.setattr(peer_server, "decode_down", buggy)
            await call.write(peer_pb2.PrefillRequest())
            async for _ in call:  # heartbeats, on a machine that stood still: the status is behind them
                pass
            assert await call.code() is grpc.StatusCode.OK, "its process is well"
            await until(p.ends)
        await p.server.stop(0)

    run_quiet(body())
    (told,) = [record for record in caplog.records if record.name == "jdisagg.api.peer.server"]
    assert told.exc_info is not None
    assert str(told.exc_info[1]) == "a bug"


def test_the_log_says_once_over_what_kv_comes(caplog: pytest.LogCaptureFixture):
    async def body() -> None:
        caplog.set_level("INFO")
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        for handoff in (H1, H2):
            d.client.open(address, handoff, opening())
        await until(lambda: len(p.opened()) == 2)
        assert caplog.text.count(f"prefill peer {address}: KV comes over grpc") == 1
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_the_log_says_of_each_process_of_a_peer_once_that_it_computes_other_bits(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    async def body() -> None:
        monkeypatch.setattr("jdisagg.api.peer.presence.PROBE_INTERVAL_S", 0.05)
        alike, odd = Prefill(identity(bits="48-aa")), Prefill(identity(bits="48-bb"))
        d, addresses = Decode(identity(bits="48-aa")), [await one.start() for one in (alike, odd)]
        d.client.watch(tuple(addresses))
        await until(lambda: all(map(d.usable, addresses)))
        told = f"prefill peer {addresses[1]} computes bits 48-bb, we 48-aa: "
        assert caplog.text.count(told) == caplog.text.count("computes bits") == 1
        assert d.client.snapshot()[addresses[1]]["bits"] == "48-bb"
        assert [*map(d.client.is_unlike, addresses), d.client.is_unlike("nobody:1")] == [False, True, False]
        await asyncio.sleep(0.2)  # several more Hellos
        assert caplog.text.count(told) == 1
        odd.service._identity = identity(bits="48-cc")
        await until(lambda: "computes bits 48-cc" in caplog.text)
        await d.client.aclose()
        for one in (alike, odd):
            await one.server.stop(0)

    run_quiet(body())
