"""Hand-off streams over real sockets: every message arrives once and in order, and a stream that begins late begins."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from time import monotonic

import grpc
import pytest

from jdisagg.api import channels
from jdisagg.api.peer import stream as peer_stream
from jdisagg.api.peer.codec import encode_down
from jdisagg.api.tasks import cancel_and_wait
from jdisagg.core.config import TransferConfig
from jdisagg.core.requests import Output
from jdisagg.handoff.actions import Export
from jdisagg.handoff.events import PeerAlive, PeerMessage
from jdisagg.handoff.messages import Accepted, Ack, Done, Grant, HandoffId, Started, Want
from jdisagg.handoff.prefill_side import PrefillSide
from jdisagg.v1 import peer_pb2_grpc
from tests.unit.wire.peers import CHUNK, H1, Decode, Prefill, beat, opening
from tests.unit.wire.rig import FAST, identity, run_quiet, until


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
        await until(lambda: (p.service.num_streams, len(d.client._streams)) == (0, 0))
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
