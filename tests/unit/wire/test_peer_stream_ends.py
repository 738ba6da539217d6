"""A hand-off stream ends once for both sides, whoever ends it, whatever is on its way; one that cannot be read ends alone."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import grpc
import pytest

from jdisagg.api import channels
from jdisagg.api.peer import server as peer_server
from jdisagg.api.tasks import cancel_and_wait
from jdisagg.core.errors import HandoffLost
from jdisagg.core.requests import FinishReason, Output
from jdisagg.handoff.ladder import is_final
from jdisagg.handoff.messages import Accepted, Ack, Done, HandoffId, StreamEnded
from jdisagg.v1 import peer_pb2, peer_pb2_grpc
from tests.unit.wire.peers import CHUNK, H1, Decode, Prefill, beat, opened_by_hand, opening
from tests.unit.wire.rig import WAIT_LIMIT_S, identity, run_quiet, until


async def opened_and_writing(d: Decode, p: Prefill, address: str, number: int) -> HandoffId:
    """The hand-off of that number, for which D writes what takes a while."""
    handoff = HandoffId("r", number)
    d.client.open(address, handoff, opening())
    await until(lambda: len(p.opened()) > number)
    for _ in range(4):
        d.client.send(handoff, Ack(key="k" * 2**20))
    await asyncio.sleep(0.002)
    return handoff


def test_prefill_closing_the_stream_ends_it_once_on_both_sides():
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        d.client.open(await p.start(), H1, opening())
        await until(p.opened)
        p.opened()[0].reply.send(Accepted(cached_tokens=0))
        p.opened()[0].reply.close()
        await until(lambda: d.ends(H1) and p.ends())
        await asyncio.sleep(0.1)
        accepted, end = d.messages(H1)
        assert (accepted, d.ends(H1)) == (Accepted(cached_tokens=0), ["closed"])
        assert isinstance(end, StreamEnded)
        assert "it ended the stream, as it missed our heartbeats" in str(end.error), (
            "D's log says who ended it, and where to look"
        )
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
            assert ends[0] == done
            assert d.ends(handoff) in ([], ["closed"]), "what follows the last word tells nobody anything"
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
            (end,) = d.messages(handoff)
            assert isinstance(end, StreamEnded)
            assert (end.reason, "it ended the stream" in str(end.error)) == ("closed", True), (
                "gRPC's own word tells nobody anything"
            )
        assert d.usable(address)
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())
    assert "is down" not in caplog.text


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
        assert "request r of pid 1 @ here: " in told
        assert "got [2, 8]" in told
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())
