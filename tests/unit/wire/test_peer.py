"""Hand-off streams over real sockets: order, ends, restarts, refusals, bytes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any, cast

import grpc
import pytest

from jdisagg.api import channels
from jdisagg.api.codec import encode_request
from jdisagg.api.peer import piece_server
from jdisagg.api.peer import server as peer_server
from jdisagg.api.peer import stream as peer_stream
from jdisagg.api.peer.byte_source import GrpcByteSource
from jdisagg.api.peer.client import GrpcPeerClient
from jdisagg.api.peer.codec import DOWN_HEARTBEAT, decode_down, encode_down
from jdisagg.api.peer.identity_codec import encode_identity
from jdisagg.api.peer.piece_server import add_peer_service
from jdisagg.api.peer.server import PeerServer
from jdisagg.api.pulse import cancel_and_wait
from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import HandoffLost
from jdisagg.core.requests import FinishReason, Output
from jdisagg.handoff.actions import Export
from jdisagg.handoff.events import FromPrefill, PeerAlive, PeerMessage, PeerOpened
from jdisagg.handoff.identity import Backend, CacheGroup, Identity
from jdisagg.handoff.ladder import is_final
from jdisagg.handoff.messages import (
    Accepted,
    Ack,
    Agreed,
    Awake,
    ChunkReady,
    Done,
    Grant,
    HandoffId,
    MadeAtDecode,
    Open,
    Quiet,
    Started,
    StreamEnded,
    Want,
)
from jdisagg.handoff.prefill_side import PrefillSide
from jdisagg.kv.spec import KVSpec
from jdisagg.v1 import peer_pb2, peer_pb2_grpc
from tests.unit.reading import read_whole
from tests.unit.wire.rig import FAST, WAIT_LIMIT_S, identity, narrow_channel, request, run_quiet, start_server, until


class Prefill:
    """A P whose engine is this list of events."""

    def __init__(self, who: Identity, config: TransferConfig = FAST) -> None:
        self.events: list[PeerOpened | PeerMessage | PeerAlive] = []
        self.pieces: dict[str, bytes] = {}
        self.service = PeerServer(who, post=self.events.append, pieces=self.pieces, config=config)

    async def start(self, port: int = 0) -> str:
        self.server, address = await start_server(lambda server: add_peer_service(self.service, server), port)
        return address

    def opened(self) -> list[PeerOpened]:
        return [event for event in self.events if isinstance(event, PeerOpened)]

    def messages(self) -> list[object]:
        return [event.message for event in self.events if isinstance(event, PeerMessage)]

    def ends(self) -> list[str]:
        return [message.reason for message in self.messages() if isinstance(message, StreamEnded)]


class Decode:
    """A D whose inbox is a list."""

    def __init__(self, who: Identity | None = None, config: TransferConfig = FAST) -> None:
        self.events: list[FromPrefill] = []
        self.client = GrpcPeerClient(
            who or identity(epoch="d"), loop=asyncio.get_running_loop(), post=self.events.append, config=config
        )

    def usable(self, peer: str) -> bool:
        """Whether the last thing heard of it was good."""
        return self.client.failures().get(peer) == ""

    def messages(self, handoff: HandoffId) -> list[object]:
        """What P said, and the end."""
        mine = [event.message for event in self.events if event.handoff == handoff]
        return [message for message in mine if not isinstance(message, MadeAtDecode)]

    def pulse(self, handoff: HandoffId) -> list[type]:
        """What was noticed of P's heartbeats, and the end."""
        mine = [event.message for event in self.events if event.handoff == handoff]
        return [type(message) for message in mine if isinstance(message, Quiet | Awake | StreamEnded)]

    def ends(self, handoff: HandoffId) -> list[str]:
        return [message.reason for message in self.messages(handoff) if isinstance(message, StreamEnded)]


class _Bytes(bytearray):
    """They can be seen to be freed."""


def opening(request_id: str = "r") -> Open:
    return Open(request=request(request_id), held_tokens=1, backend="grpc")


async def opened_by_hand(stub: peer_pb2_grpc.PeerServiceAsyncStub, p: Prefill, request_id: str) -> grpc.aio.StreamStreamCall:
    """A stream of a D that sends no heartbeats and reads when the test does. Like D it sends again what came late."""
    before = len(p.opened())
    hello = await stub.Hello(peer_pb2.HelloRequest(identity=encode_identity(identity(epoch="d"))))
    while True:
        call = stub.Prefill()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.write(encode_down(opening(request_id), epoch=hello.identity.epoch, now_s=monotonic()))
        await until(lambda: len(p.opened()) > before or call.done())  # noqa: B023
        if len(p.opened()) > before:
            return call
        if await call.code() is not grpc.StatusCode.INTERNAL:  # which it is where the write met the end of the stream
            assert "no `open` came within" in await call.details()


async def beat(call: grpc.aio.StreamStreamCall) -> None:
    """For a D by hand: it is alive, and says so."""
    while True:
        await call.write(DOWN_HEARTBEAT)
        await asyncio.sleep(FAST.heartbeat_s)


async def opened_and_writing(d: Decode, p: Prefill, address: str, number: int) -> HandoffId:
    """The hand-off of that number, for which D writes what takes a while."""
    handoff = HandoffId("r", number)
    d.client.open(address, handoff, opening())
    await until(lambda: len(p.opened()) > number)
    for _ in range(4):
        d.client.send(handoff, Ack(key="k" * 2**20))
    await asyncio.sleep(0.002)
    return handoff


CHUNK = ChunkReady(key="k", begin=1, end=3, shape=(2, 2, 2, 8), dtype="float32", num_bytes=256, checksum=2**64 - 1)
H1 = HandoffId("r", 1)
H2 = HandoffId("r", 2)


@pytest.mark.covers("P01", "D02")
def test_messages_arrive_in_order_both_ways_and_a_clean_close_ends_once():
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.open(address, H1, opening())
        down = [Grant(credit_bytes=10), Ack(key="k"), Want(begin=0, end=2, reason="lost"), Grant(credit_bytes=2**40)]
        for message in down:
            d.client.send(H1, message)
        await until(lambda: len(p.messages()) == 4)
        assert p.messages() == down
        (opened,) = p.opened()
        assert opened.message.held_tokens == 1
        assert opened.message.request.prompt_token_ids == (1, 2, 3)
        done = Done(first=Output(request_id="r", token_ids=(7,)), num_chunks=1)
        answers = [Accepted(cached_tokens=1), Started(), CHUNK, done]
        for answer in answers:
            opened.reply.send(answer)
        await until(lambda: len(d.messages(H1)) == 4)
        assert d.messages(H1) == answers
        await asyncio.sleep(3 * FAST.dead_after_s)  # heartbeats keep an idle stream alive
        d.client.close(H1)
        d.client.close(H1)
        await until(p.ends)
        opened.reply.send(Accepted(cached_tokens=0))  # dropped
        await asyncio.sleep(0.1)
        assert p.ends() == ["closed"]
        assert d.ends(H1) == []
        await until(lambda: (p.service.num_streams, d.client.num_streams) == (0, 0))
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


@pytest.mark.covers("I-5")
def test_heartbeats_of_a_decode_worker_that_has_nothing_to_say_renew_its_leases():
    async def body() -> None:
        p, d = Prefill(identity(), dataclasses.replace(FAST, lease_s=4 * FAST.heartbeat_s)), Decode()
        d.client.open(await p.start(), H1, opening())
        await until(p.opened)
        await until(lambda: len([event for event in p.events if isinstance(event, PeerAlive)]) >= 3)
        assert p.messages() == []
        side = PrefillSide(FAST, bytes_per_token=1)
        side.open(H1, opening(), 0.0)
        side.on_admitted(H1, 0)
        side.on_message(H1, Grant(credit_bytes=100), 0.0)
        (cut,) = [action for action in side.on_computed("r#1", 3) if isinstance(action, Export)]
        side.on_published(H1, dataclasses.replace(CHUNK, key=cut.key), 0.0)
        side.on_heartbeat(H1, FAST.lease_s)
        for half in range(1, round(2 * FAST.lease_s)):
            assert side.tick(FAST.lease_s + half / 2) == []
        assert side.tick(2 * FAST.lease_s) != []
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_prefill_closing_the_stream_ends_it_once_on_both_sides():
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        d.client.open(await p.start(), H1, opening())
        await until(p.opened)
        p.opened()[0].reply.send(Accepted(cached_tokens=0))
        p.opened()[0].reply.close()
        await until(lambda: d.ends(H1) and p.ends())
        await asyncio.sleep(0.1)
        assert d.messages(H1) == [Accepted(cached_tokens=0), StreamEnded(reason="closed")]
        assert p.ends() == ["closed"]
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_prefill_s_last_word_arrives_while_decode_writes_and_nobody_is_down(caplog: pytest.LogCaptureFixture):
    """A request that its first token ends: P says Done and closes; D's acknowledgements and heartbeats are on their way."""
    done = Done(first=Output(request_id="r", token_ids=(7,), finish=FinishReason.STOP), num_chunks=0)

    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        for number in range(20):
            handoff = await opened_and_writing(d, p, address, number)
            p.opened()[-1].reply.send(done)
            p.opened()[-1].reply.close()
            await until(lambda handoff=handoff: any(isinstance(message, Done) for message in d.messages(handoff)))
            ends = [message for message in d.messages(handoff) if isinstance(message, Done | StreamEnded)]
            assert ends in ([done], [done, StreamEnded(reason="closed")]), "what follows the last word tells nobody anything"
            d.client.close(handoff)
        assert d.usable(address)
        await until(lambda: len(p.ends()) == 20)
        assert set(p.ends()) == {"closed"}
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())
    assert "is down" not in caplog.text


def test_a_write_that_meets_the_stream_s_end_does_not_make_prefill_dead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """An older P returns its status at once: gRPC replaces it by INTERNAL."""
    monkeypatch.setattr("jdisagg.api.peer.server.LINGER_SHARE", 0.0)

    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        for number in range(20):
            handoff = await opened_and_writing(d, p, address, number)
            p.opened()[-1].reply.close()
            await until(lambda handoff=handoff: d.ends(handoff))
            assert d.messages(handoff) == [StreamEnded(reason="closed")], "gRPC's own word for it tells nobody anything"
        assert d.usable(address)
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())
    assert "is down" not in caplog.text


def test_a_failed_question_never_ends_the_streams_beside_it(monkeypatch):
    """A slow P misses a probe, or one of its streams dies: the other hand-offs on the connection go on."""

    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.open(address, H1, opening())
        await until(p.opened)

        p.service._identity = dataclasses.replace(p.service._identity, fingerprint="refuses every Hello from now on")
        monkeypatch.setattr("jdisagg.api.peer.client.PROBE_INTERVAL_S", 0.05)
        d.client.watch((address,))
        await until(lambda: not d.usable(address))
        await asyncio.sleep(0.2)
        assert d.ends(H1) == []
        p.opened()[0].reply.send(Accepted(cached_tokens=3))
        await until(lambda: d.messages(H1) == [Accepted(cached_tokens=3)])
        d.client.close(H1)
        await until(lambda: p.ends() == ["closed"])
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_watched_peers_are_known_to_be_down_until_they_answer(monkeypatch):
    async def body() -> None:
        monkeypatch.setattr("jdisagg.api.peer.client.PROBE_INTERVAL_S", 0.05)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        address = f"127.0.0.1:{port}"
        p, d = Prefill(identity()), Decode()
        assert not d.client.is_down(address)  # never asked
        d.client.watch((address,))
        await until(lambda: d.client.is_down(address))
        await p.start(port)
        await until(lambda: not d.client.is_down(address))
        assert d.usable(address)
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


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
        assert line.startswith("request r of ipv4:127.0.0.1:")
        assert why in line


def test_a_connection_that_is_gone_is_in_the_log_though_it_reads_as_an_end_in_good_order(caplog: pytest.LogCaptureFixture):
    """gRPC says both, and either may come first."""
    caplog.set_level(logging.INFO, "jdisagg.api.peer.server")
    gone = asyncio.Event()

    class Context:
        """Of a call to which P says nothing."""

        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

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


@pytest.mark.covers("X22")
def test_death_of_prefill_ends_every_stream_once_within_a_second():
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.open(address, H1, opening())
        d.client.open(address, H2, opening())
        await until(lambda: len(p.opened()) == 2)
        for opened in p.opened():
            opened.reply.send(Accepted(cached_tokens=0))
        await until(lambda: d.messages(H1) and d.messages(H2))
        assert d.usable(address)
        await p.server.stop(0)
        assert await until(lambda: d.ends(H1) and d.ends(H2)) < 1.0
        await asyncio.sleep(0.1)
        assert d.ends(H1) == d.ends(H2) == ["dead"]
        assert not d.usable(address)
        assert len(p.ends()) == 2
        await d.client.aclose()

    run_quiet(body())


def test_streams_of_one_request_get_different_serials_at_prefill():
    async def body() -> None:
        p, d, e = Prefill(identity()), Decode(), Decode()
        address = await p.start()
        d.client.open(address, H1, opening())
        e.client.open(address, H1, opening())
        await until(lambda: len(p.opened()) == 2)
        assert len({opened.handoff for opened in p.opened()}) == 2
        await d.client.aclose()
        await e.client.aclose()
        await until(lambda: len(p.ends()) == 2)
        await p.server.stop(0)

    run_quiet(body())


@pytest.mark.covers("C04")
def test_prefill_restarted_at_its_address_serves_the_next_request():
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.open(address, H1, opening())
        await until(p.opened)
        p.opened()[0].reply.send(Accepted(cached_tokens=0))
        await until(lambda: d.messages(H1))
        d.client.close(H1)
        await until(p.ends)
        await p.server.stop(0)
        again = Prefill(identity(epoch="epoch-2"))
        await again.start(port=int(address.rpartition(":")[2]))
        d.client.open(address, H2, opening())
        d.client.send(H2, Grant(credit_bytes=5))
        await until(again.messages)
        assert again.messages() == [Grant(credit_bytes=5)]
        again.opened()[0].reply.send(Accepted(cached_tokens=3))
        await until(lambda: d.messages(H2))
        assert d.messages(H2) == [Accepted(cached_tokens=3)]
        await d.client.aclose()
        await until(again.ends)
        await again.server.stop(0)

    run_quiet(body())


def test_another_process_behind_a_live_connection_is_greeted_anew():
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.watch(())
        d.client.open(address, H1, opening())
        await until(p.opened)
        p.service._identity = dataclasses.replace(p.service._identity, epoch="epoch-2")  # a proxy swapped the process
        d.client.open(address, H2, opening())
        await until(lambda: len(p.opened()) == 2)
        await d.client.aclose()
        await until(lambda: len(p.ends()) == 2)
        assert [opened.handoff.request_id for opened in p.opened()] == [H1.request_id, H2.request_id]
        await p.server.stop(0)

    run_quiet(body())


@pytest.mark.parametrize("kind", ["refused", "silent"])
def test_unreachable_prefill_fails_within_about_a_second(kind):
    async def body() -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            if kind == "silent":
                listener.listen()  # accepts and never speaks
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            d = Decode()
            d.client.open(address, H1, opening())
            assert await until(lambda: d.ends(H1)) < 1.6
            assert d.ends(H1) == ["unreachable"]
            assert address in str(d.events[0].message.error)
            assert not d.usable(address)
            await d.client.aclose()

    run_quiet(body(), patient=False)


def test_silence_of_either_side_is_seen_by_the_other():
    async def body() -> None:
        frozen = TransferConfig(heartbeat_s=5.0, dead_after_s=30.0)  # sends nothing while the other side listens
        p, d = Prefill(identity(), frozen), Decode()
        d.client.open(await p.start(), H1, opening())
        await until(p.opened)
        took_s = await until(lambda: d.ends(H1))
        assert 0.5 * FAST.dead_after_s < took_s < 4 * FAST.dead_after_s
        assert d.ends(H1) == ["heartbeat"]
        assert d.pulse(H1) == [Quiet, StreamEnded], "first it is quiet, then dead"
        await until(p.ends)
        await p.server.stop(0)
        q, e = Prefill(identity()), Decode(config=frozen)
        e.client.open(await q.start(), H1, opening())
        await until(q.opened)
        assert await until(q.ends) < 4 * FAST.dead_after_s
        assert q.ends() == ["heartbeat"]
        await until(lambda: e.ends(H1))
        for client in (d.client, e.client):
            await client.aclose()
        await q.server.stop(0)

    run_quiet(body())


class _Silent(PeerServer):
    """Says Hello, and nothing on a stream."""

    async def Prefill(self, request_iterator: Any, context: Any) -> None:
        await asyncio.sleep(60)


@pytest.mark.parametrize("closed", [False, True])
def test_silence_makes_prefill_dead_also_when_decode_has_ended_the_hand_off(closed: bool):
    """It holds the reads of others: a cancelled or hedged hand-off may be the only one that finds out."""

    async def body() -> None:
        silent = _Silent(identity(), post=lambda event: None, pieces={}, config=FAST)
        server, address = await start_server(lambda server: add_peer_service(silent, server))
        down: list[str] = []
        client = GrpcPeerClient(
            identity(epoch="d"), loop=asyncio.get_running_loop(), post=lambda event: None, config=FAST, on_down=down.append
        )
        client.open(address, H1, opening())
        await until(lambda: client.failures() == {address: ""})
        if closed:
            client.close(H1)
        took_s = await until(lambda: down == [address])
        assert took_s < 3 * FAST.dead_after_s
        assert client.failures()[address]
        await client.aclose()
        await server.stop(0)

    run_quiet(body())


@pytest.mark.parametrize("size", [10, 2**20])
def test_a_stream_that_decode_ends_while_prefill_writes_ends_for_both(size: int, caplog: pytest.LogCaptureFixture):
    async def body() -> None:
        p = Prefill(identity())
        address = await p.start()
        async with channels.open_channel(address) as channel:
            stub = peer_pb2_grpc.PeerServiceStub(channel)
            for serial in range(20):
                call = await opened_by_hand(stub, p, f"r{serial}")
                for _ in range(20):
                    p.opened()[-1].reply.send(dataclasses.replace(CHUNK, locator="x" * size))
                await asyncio.sleep(serial * 0.001)
                await call.done_writing()
                async with asyncio.timeout(WAIT_LIMIT_S):
                    while await call.read() is not grpc.aio.EOF:
                        pass
                    assert await call.code() is grpc.StatusCode.OK
        assert p.ends() == ["closed"] * 20
        await p.server.stop(0)
        assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []

    run_quiet(body())


@pytest.mark.parametrize("wakes", [True, False])
def test_a_decode_worker_that_takes_nothing_any_more_is_no_error_of_the_server(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, wakes: bool
):
    monkeypatch.setattr(peer_server, "LAST_WRITE_S", 100.0 if wakes else 0.2)

    async def body() -> None:
        p = Prefill(identity())
        address = await p.start()
        async with channels.open_channel(address) as channel:
            stub = peer_pb2_grpc.PeerServiceStub(channel)
            call = await opened_by_hand(stub, p, "r")
            p.opened()[0].reply.send(dataclasses.replace(CHUNK, locator="x" * 2**26))  # more than gRPC's window takes
            await until(p.ends)
            assert p.ends() == ["heartbeat"], "the engine does not wait"
            await asyncio.sleep(0.5)
            if wakes:
                assert (await call.read()).chunk_ready.key == CHUNK.key
                assert await call.read() is grpc.aio.EOF
                assert await call.code() is grpc.StatusCode.OK
        await p.server.stop(0)
        assert (p.ends(), p.service.num_streams) == (["heartbeat"], 0)
        assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []

    run_quiet(body())


@pytest.mark.covers("X14")
def test_answers_that_a_decode_worker_never_reads_do_not_heap_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer_server, "LAST_WRITE_S", 0.2)
    monkeypatch.setattr(peer_server, "MOST_UNREAD", 100)

    async def body() -> None:
        p = Prefill(identity())
        address = await p.start()
        async with channels.open_channel(address) as channel:
            call = await opened_by_hand(peer_pb2_grpc.PeerServiceStub(channel), p, "r")
            reply = p.opened()[0].reply
            reply.send(dataclasses.replace(CHUNK, locator="x" * 2**26))  # more than gRPC's window takes
            for number in range(200):
                reply.send(Ack(key=f"k{number}"))
            beating = asyncio.create_task(beat(call))
            await until(p.ends)
            assert len(p.ends()) == 1
            await cancel_and_wait(beating)
        await p.server.stop(0)
        assert p.service.num_streams == 0

    run_quiet(body())


def test_a_quiet_prefill_worker_is_heard_again_with_its_next_message():
    async def body() -> None:
        frozen = TransferConfig(heartbeat_s=60.0, dead_after_s=300.0)
        p, d = Prefill(identity(), frozen), Decode(config=TransferConfig(heartbeat_s=0.1, dead_after_s=5.0))
        d.client.open(await p.start(), H1, opening())
        await until(lambda: d.pulse(H1))
        p.opened()[0].reply.send(Accepted(cached_tokens=0))
        await until(lambda: d.pulse(H1) == [Quiet, Awake])
        order = [event.message for event in d.events if not isinstance(event.message, Agreed)]
        assert order == [Quiet(3.0), Accepted(cached_tokens=0), Awake()], "a refusal would be read before it is gone back to"
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


SHM, OTHER_SHM = Backend(name="shm", version="this host"), Backend(name="shm", version="another host")
JAX = Backend(name="jax", version="0.10.2", num_transport_addresses=2)
GRPC = Backend(name="grpc")


@pytest.mark.covers("P09")
@pytest.mark.parametrize(
    ("of_p", "of_d", "agreed"),
    [
        ((SHM, GRPC), (SHM, GRPC), ("shm", "grpc")),
        ((GRPC, SHM), (SHM, GRPC), ("shm", "grpc")),
        ((SHM, GRPC), (OTHER_SHM, GRPC), ("grpc",)),
        ((JAX, GRPC), (JAX, GRPC), ("jax", "grpc")),
        ((JAX, GRPC), (dataclasses.replace(JAX, version="0.11"), GRPC), ("grpc",)),
        ((JAX, GRPC), (dataclasses.replace(JAX, num_transport_addresses=1), GRPC), ("grpc",)),
        ((GRPC,), (JAX, GRPC), ("grpc",)),
    ],
)
def test_both_sides_know_the_backends_they_share_in_the_order_of_d(of_p, of_d, agreed):
    async def body() -> None:
        p, d = Prefill(identity(backends=of_p)), Decode(identity(epoch="d", backends=of_d))
        d.client.open(await p.start(), H1, dataclasses.replace(opening(), head_shards=4))
        await until(p.opened)
        said = p.opened()[0].message
        assert (said.backend, said.backends, said.head_shards) == (agreed[0], agreed, 4)
        assert [event.message for event in d.events] == [Agreed(backends=agreed)], "before anything P says"
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_an_open_of_a_peer_that_knows_one_backend_means_that_one_alone():
    wire = peer_pb2.PrefillRequest(open=peer_pb2.Open(request=encode_request(request(), 0.0), epoch="e", backend="grpc"))
    decoded = decode_down(wire, 0.0)
    assert isinstance(decoded, Open)
    assert (decoded.backend, decoded.backends, decoded.head_shards) == ("grpc", (), 1)


SPEC = KVSpec(num_layers=2, num_kv_heads=2, features=8, dtype="float32")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"fingerprint": "weights-2"}, "fingerprint: wanted weights-1, got weights-2"),
        (
            {"fingerprint": "weights-2", "fingerprint_parts": (("numerics", "fast"),)},
            "numerics: wanted exact, got fast",
        ),
        ({"min_protocol": 7, "max_protocol": 9}, r"protocol: wanted \[1, 2\], got \[7, 9\]"),
        ({"groups": ()}, "groups: wanted 1, got 0"),
        (
            {"groups": (CacheGroup(spec=dataclasses.replace(SPEC, num_kv_heads=4), page_size=16),)},
            r"groups\[0\].num_kv_heads: wanted 2, got 4",
        ),
        ({"backends": (Backend(name="shm"),)}, "backends: wanted grpc, got shm"),
    ],
)
def test_hello_refuses_an_unlike_peer_and_names_the_field(changes, field):
    async def body() -> None:
        p, d = Prefill(identity(fingerprint_parts=(("numerics", "exact"),))), Decode(identity(**changes))
        address = await p.start()
        d.client.open(address, H1, opening())
        await until(lambda: d.ends(H1))
        (ended,) = d.messages(H1)
        assert isinstance(ended, StreamEnded)
        assert ended.reason == "hello"
        with pytest.raises(Exception, match=field):
            raise ended.error or AssertionError("no error")
        assert not d.usable(address)
        assert p.opened() == []
        assert d.client.is_doubtful(address), "others are asked first"
        p.service._identity = d.client._identity  # as if it had been started again, and rightly
        d.client.open(address, H2, opening())
        await until(lambda: d.usable(address))
        assert not d.client.is_doubtful(address)
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_the_log_says_when_a_peer_that_was_down_is_there_and_does_not_pair(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    async def body() -> None:
        monkeypatch.setattr("jdisagg.api.peer.client.PROBE_INTERVAL_S", 0.05)
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


def test_peers_that_nobody_asks_any_more_are_forgotten_with_their_connections(monkeypatch: pytest.MonkeyPatch):
    async def body() -> None:
        monkeypatch.setattr("jdisagg.api.peer.book.FORGET_S", 0.2)
        down: list[str] = []
        watched, old, new, d = Prefill(identity()), Prefill(identity()), Prefill(identity()), Decode()
        d.client._on_down = down.append
        addresses = [await p.start() for p in (watched, old, new)]
        d.client.watch((addresses[0],))
        d.client.open(addresses[1], H1, opening())
        await until(old.opened)
        await asyncio.sleep(0.3)
        d.client.open(addresses[2], H2, opening())
        await until(new.opened)
        assert set(d.client.failures()) == set(addresses), "a hand-off is open there"
        d.client.close(H1)
        await until(lambda: d.client.num_streams == 1)
        d.client.open(addresses[2], HandoffId("r", 3), opening())
        await until(lambda: len(new.opened()) == 2)
        assert set(d.client.failures()) == {addresses[0], addresses[2]}
        assert down == [addresses[1]]
        await until(lambda: not d.client._retiring)
        d.client.open(addresses[1], HandoffId("r", 4), opening())
        await until(lambda: len(old.opened()) == 2)
        await d.client.aclose()
        for p in (watched, old, new):
            await p.server.stop(0)

    run_quiet(body())


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


def test_page_size_and_dtype_may_differ_and_watched_peers_become_usable():
    async def body() -> None:
        theirs = CacheGroup(spec=dataclasses.replace(SPEC, dtype="bfloat16"), page_size=64)
        p, d = Prefill(identity()), Decode(identity(groups=(theirs,)))
        address = await p.start()
        assert not d.usable(address)
        d.client.watch((address,))
        await until(lambda: d.usable(address))
        await p.server.stop(0)
        await until(lambda: not d.usable(address))
        await d.client.aclose()

    run_quiet(body())


def test_a_watched_peer_that_drains_is_passed_over_and_what_it_has_taken_on_goes_on(caplog: pytest.LogCaptureFixture):
    async def body() -> None:
        p, d, handoff = Prefill(identity()), Decode(), HandoffId("r", 1)
        address = await p.start()
        d.client.watch((address,))
        d.client.open(address, handoff, opening())
        await until(lambda: p.opened() and d.usable(address))
        p.service.drain()
        await until(lambda: d.client.is_down(address))
        assert d.client.failures() == {address: "it is draining"}
        p.opened()[0].reply.send(Accepted(cached_tokens=0))
        await until(lambda: d.messages(handoff) == [Accepted(cached_tokens=0)])
        await p.server.stop(0)
        await until(lambda: d.client.failures()[address] not in ("", "it is draining"))
        again = Prefill(identity(epoch="again"))
        await again.start(int(address.rpartition(":")[2]))
        await until(lambda: d.usable(address))
        await d.client.aclose()

    caplog.set_level("INFO")
    run_quiet(body())
    levels = [(record.levelname, "is draining" in record.getMessage()) for record in caplog.records]
    assert levels.count(("INFO", True)) == 1
    assert ("WARNING", False) not in levels


def test_an_open_that_does_not_come_in_time_is_sent_again_and_no_fault_of_the_request(monkeypatch: pytest.MonkeyPatch):
    """The connection stalls behind the stream's head."""
    write, stalled = peer_stream._write, []

    async def stall_once(call, queue):
        if not stalled:
            stalled.append(call)
            await asyncio.sleep(4 * FAST.dead_after_s)
        await write(call, queue)

    monkeypatch.setattr(peer_stream, "_write", stall_once)

    async def body() -> None:
        p, d = Prefill(identity()), Decode(config=TransferConfig(heartbeat_s=0.1, dead_after_s=5.0))
        d.client.open(await p.start(), H1, opening())
        await until(p.opened)
        assert stalled[0].done()
        assert await stalled[0].code() is grpc.StatusCode.UNAVAILABLE
        assert await stalled[0].details() == "prefill stream: no `open` came within 0.5 s"
        assert d.ends(H1) == [], "the hand-off goes on with the second stream"
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_a_prefill_worker_that_stood_still_itself_takes_an_open_that_came_meanwhile():
    """A burst of hundreds of them takes its loop longer than `dead_after_s` to read."""

    async def body() -> None:
        p = Prefill(identity(epoch="e"))
        async with channels.open_channel(await p.start()) as channel:
            call = peer_pb2_grpc.PeerServiceStub(channel).Prefill()
            await call.wait_for_connection()
            await asyncio.sleep(0.1)  # P waits for it
            write = asyncio.create_task(call.write(encode_down(opening(), epoch="e", now_s=monotonic())))
            await asyncio.sleep(0)
            time.sleep(2 * FAST.dead_after_s)
            await write
            beating = asyncio.create_task(beat(call))
            await until(p.opened)
            assert (p.service.num_streams, p.ends()) == (1, [])
            await cancel_and_wait(beating)
        await p.server.stop(0)

    run_quiet(body())


@pytest.mark.covers("C07")
def test_a_malformed_stream_ends_alone():
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.open(address, H1, opening())
        await until(p.opened)
        channel = channels.open_channel(address)
        stub = peer_pb2_grpc.PeerServiceStub(channel)
        empty = peer_pb2.PrefillRequest(open=peer_pb2.Open(epoch="epoch-1", backend="grpc"))
        for first in (peer_pb2.PrefillRequest(), peer_pb2.PrefillRequest(grant=peer_pb2.Grant(credit_bytes=1)), empty):
            call = stub.Prefill()
            await call.write(first)  # and nothing more, which might meet the end of the stream: that loses its status
            with pytest.raises(Exception, match="INVALID_ARGUMENT"):
                await call.read()
        assert len(p.opened()) == 1
        d.client.send(H1, Ack(key="still here"))
        await until(lambda: Ack(key="still here") in p.messages())
        await channel.close()
        await d.client.aclose()
        await until(p.ends)
        await p.server.stop(0)

    run_quiet(body())


def test_a_message_that_cannot_be_read_ends_its_hand_off_with_a_status_that_leaves_the_request_alone(
    caplog: pytest.LogCaptureFixture,
):
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        d.client.open(await p.start(), H1, opening())
        await until(p.opened)
        p.opened()[0].reply.send(Accepted(cached_tokens=0))
        await until(lambda: d.messages(H1))
        d.client.send(H1, dataclasses.replace(CHUNK, shape=(2, 8)))
        await until(lambda: d.ends(H1) and p.ends())
        assert p.ends() == ["dead"]
        ended = d.messages(H1)[-1]
        assert isinstance(ended, StreamEnded)
        assert isinstance(ended.error, HandoffLost)
        assert not is_final(ended.error)
        assert "chunk k: wanted shape [layers, tokens, heads, features], got [2, 8]" in ended.error.message
        (told,) = [record.getMessage() for record in caplog.records if record.name == "jdisagg.api.peer.server"]
        assert "request r of ipv4:127.0.0.1:" in told
        assert "got [2, 8]" in told
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_fetch_streams_the_bytes_and_unknown_keys_answer_at_once():
    async def body() -> None:
        p = Prefill(identity())
        address = await p.start()
        p.pieces["k"] = bytes(range(256)) * 12_345  # 3.01 MiB: not a whole number of parts
        p.pieces["empty"] = b""
        source = GrpcByteSource()

        def read(key: str, peer: str = address, left_s: float = 30.0) -> bytes:
            return read_whole(source, peer, key, monotonic() + left_s)

        assert await asyncio.to_thread(read, "k") == p.pieces["k"]
        assert await asyncio.to_thread(read, "empty") == b""
        with pytest.raises(KeyError, match="nope"):
            await asyncio.to_thread(read, "nope")
        with pytest.raises(KeyError):
            await asyncio.to_thread(read, "\1" * 20_000)  # longer than a status may be
        with pytest.raises(TimeoutError, match="its time was over"):  # asked, P might have served it
            await asyncio.to_thread(read, "k", address, -1.0)
        await p.server.stop(0)
        began_s = monotonic()
        with pytest.raises(ConnectionError, match=address):
            await asyncio.to_thread(read, "k", address, 60.0)
        assert monotonic() - began_s < 20.0
        await p.start(port=int(address.rpartition(":")[2]))
        assert await asyncio.to_thread(read, "k") == p.pieces["k"]  # a restarted peer is reached at once
        source.close()
        await p.server.stop(0)

    run_quiet(body())


def test_bytes_that_nobody_takes_are_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(piece_server, "STALL_TIMEOUT_S", 0.3, raising=False)

    async def body() -> None:
        p = Prefill(identity())
        address = await p.start()
        piece = p.pieces["k"] = _Bytes(64 * 2**20)
        channel = narrow_channel(address)
        call = peer_pb2_grpc.PeerServiceStub(channel).Fetch(peer_pb2.FetchRequest(key="k"))
        await call.read()
        del p.pieces["k"]  # acknowledged, or its lease is over
        held = weakref.ref(piece)
        del piece
        assert held() is not None
        await until(lambda: held() is None)

        async def take_the_rest() -> None:
            while await call.read() is not grpc.aio.EOF:
                pass

        with pytest.raises(grpc.aio.AioRpcError, match="nothing was taken"):
            await take_the_rest()
        await channel.close()
        await p.server.stop(0)

    run_quiet(body())


def test_engine_threads_may_send_from_anywhere_without_interleaving():
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        handoffs = [HandoffId(f"r{i}", i) for i in range(8)]

        def engine(handoff: HandoffId) -> None:
            d.client.open(address, handoff, opening(handoff.request_id))
            for credit in range(50):
                d.client.send(handoff, Grant(credit_bytes=credit))

        threads = [threading.Thread(target=engine, args=(handoff,)) for handoff in handoffs]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
        await until(lambda: len(p.messages()) == 8 * 50)
        for opened in p.opened():
            mine = [e.message for e in p.events if isinstance(e, PeerMessage) and e.handoff == opened.handoff]
            assert mine == [Grant(credit_bytes=credit) for credit in range(50)]
        await d.client.aclose()
        await until(lambda: len(p.ends()) == 8)
        await p.server.stop(0)

    run_quiet(body())


def test_a_taken_port_is_a_clear_error():
    async def body() -> None:
        p = Prefill(identity())
        address = await p.start()
        with pytest.raises(Exception, match="cannot listen on"):
            await Prefill(identity()).start(port=int(address.rpartition(":")[2]))
        await p.server.stop(0)

    run_quiet(body())
