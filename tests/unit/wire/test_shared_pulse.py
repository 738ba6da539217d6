"""The streams of one D to one P live, are quiet and die together, and cost the heartbeats of one."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
from collections import Counter
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

import grpc
import grpc.aio
import pytest

from jdisagg.api import channels
from jdisagg.api.peer import server as peer_server
from jdisagg.api.peer.codec import DOWN_HEARTBEAT, UP_HEARTBEAT, encode_down, encode_up
from jdisagg.api.peer.outbox import Outbox
from jdisagg.api.peer.server import PeerServer
from jdisagg.api.peer.shared_pulse import Listener, SharedPulse
from jdisagg.api.tasks import cancel_and_wait
from jdisagg.core.config import TransferConfig
from jdisagg.handoff.events import PeerAlive
from jdisagg.handoff.messages import Accepted, Ack, HandoffId
from jdisagg.v1 import peer_pb2, peer_pb2_grpc
from tests.unit.wire.peers import CHUNK, Decode, Prefill, beat, opening
from tests.unit.wire.rig import FAST, identity, run_quiet, until

NUM_STREAMS = 12
FROZEN = TransferConfig(heartbeat_s=5.0, dead_after_s=30.0)  # says nothing for the time of a test


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Heartbeats said by both sides: "up", "down"."""
    said: Counter[str] = Counter()
    beat = Outbox.beat

    def counted(outbox: Outbox[Any]) -> bool:
        has_beaten = beat(outbox)
        said["up" if outbox._heartbeat is UP_HEARTBEAT else "down"] += has_beaten
        return has_beaten

    monkeypatch.setattr(Outbox, "beat", counted)
    return said


class OldServer(PeerServer):
    """Knows nothing of `Open.pulse`."""

    async def Prefill(self, request_iterator: Any, context: Any) -> None:
        async def older() -> AsyncIterator[peer_pb2.PrefillRequest]:
            async for message in request_iterator:
                if message.WhichOneof("event") == "open":
                    message.open.ClearField("pulse")
                yield message

        await super().Prefill(older(), context)


async def opened(p: Prefill, d: Decode, num_streams: int = NUM_STREAMS) -> tuple[str, list[HandoffId]]:
    address, handoffs = await p.start(), [HandoffId("r", number) for number in range(num_streams)]
    for handoff in handoffs:
        d.client.open(address, handoff, opening())
    await until(lambda: len(p.opened()) == num_streams)
    return address, handoffs


@pytest.mark.parametrize(
    ("of_p", "of_d", "times"), [(2, 2, 1), (1, 2, NUM_STREAMS), (2, 1, NUM_STREAMS)], ids=["both new", "old P", "old D"]
)
def test_heartbeats_cost_by_the_peer_and_streams_of_an_older_one_have_their_own(
    of_p: int, of_d: int, times: int, beats: Counter[str]
) -> None:
    async def body() -> None:
        p, d = Prefill(identity(max_protocol=of_p)), Decode(identity(epoch="d", max_protocol=of_d))
        if of_p == 1:
            p.service.__class__ = OldServer
        _, handoffs = await opened(p, d)
        beats.clear()
        began_s = monotonic()
        await asyncio.sleep(4 * FAST.dead_after_s)
        assert max(beats.values()) <= 1.5 * times * ((monotonic() - began_s) / FAST.heartbeat_s + 1)
        assert (p.ends(), [d.ends(handoff) for handoff in handoffs]) == ([], [[]] * NUM_STREAMS)
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_the_others_live_on_when_a_stream_ends_and_silence_ends_them_all() -> None:
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        _, handoffs = await opened(p, d)
        for handoff in handoffs[: NUM_STREAMS // 2]:
            d.client.close(handoff)
            await asyncio.sleep(0.5 * FAST.heartbeat_s)
        await until(lambda: p.service.num_streams == NUM_STREAMS // 2)
        await asyncio.sleep(2 * FAST.dead_after_s)
        assert set(p.ends()) == {"closed"}
        assert [d.ends(handoff) for handoff in handoffs] == [[]] * NUM_STREAMS
        await d.client.aclose()
        await p.server.stop(0)
        p, d = Prefill(identity(), FROZEN), Decode()
        _, handoffs = await opened(p, d)
        took_s = await until(lambda: all(d.ends(handoff) for handoff in handoffs))
        assert 0.5 * FAST.dead_after_s < took_s < 4 * FAST.dead_after_s
        assert [d.ends(handoff) for handoff in handoffs] == [["heartbeat"]] * NUM_STREAMS
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


@pytest.mark.covers("I-5")
def test_what_comes_over_one_stream_renews_the_leases_of_all() -> None:
    async def body() -> None:
        p, d = Prefill(identity(), dataclasses.replace(FAST, lease_s=4 * FAST.heartbeat_s)), Decode()
        await opened(p, d)
        alive: Counter[HandoffId] = Counter()

        def all_thrice() -> bool:
            alive.clear()
            alive.update(event.handoff for event in p.events if isinstance(event, PeerAlive))
            return len(alive) == NUM_STREAMS and min(alive.values()) >= 3

        await until(all_thrice)
        assert p.messages() == []
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_workers_do_not_live_for_each_other() -> None:
    async def body() -> None:
        p, alive, silent = Prefill(identity()), Decode(), Decode(config=FROZEN)
        address, _ = await opened(p, alive, 1)
        silent.client.open(address, HandoffId("s", 1), opening("s"))
        await until(lambda: len(p.opened()) == 2)
        assert await until(p.ends) < 4 * FAST.dead_after_s
        await asyncio.sleep(FAST.dead_after_s)
        assert p.ends() == ["heartbeat"]
        for client in (alive.client, silent.client):
            await client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_a_stream_that_is_not_read_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one of the same D is alive meanwhile, and neither has the other's fate."""
    monkeypatch.setattr(peer_server, "LAST_WRITE_S", 0.2)
    monkeypatch.setattr(peer_server, "MOST_UNREAD", 100)

    async def body() -> None:
        p = Prefill(identity(epoch="e"))
        async with channels.open_channel(await p.start()) as channel:
            stub, calls = peer_pb2_grpc.PeerServiceStub(channel), list[grpc.aio.StreamStreamCall]()
            for name in ("unread", "read"):
                call = stub.Prefill()
                await call.write(encode_down(opening(name), epoch="e", now_s=0.0, pulse="shared"))
                await until(lambda: len(p.opened()) == len(calls) + 1)
                calls.append(call)
            beating = asyncio.create_task(beat(calls[1]))
            unread = p.opened()[0].reply
            unread.send(dataclasses.replace(CHUNK, locator="x" * 2**26))  # more than gRPC's window takes
            await asyncio.sleep(2 * FAST.dead_after_s)
            assert p.ends() == []
            for number in range(200):
                unread.send(Ack(key=f"k{number}"))
            await until(p.ends)
            p.opened()[1].reply.send(Accepted(cached_tokens=7))
            async with asyncio.timeout(20.0):
                while (answer := await calls[1].read()).WhichOneof("event") == "heartbeat":
                    pass
            assert answer == encode_up(Accepted(cached_tokens=7))
            assert len(p.ends()) == 1
            await cancel_and_wait(beating)
        await until(lambda: p.service.num_streams == 0)
        await p.server.stop(0)

    run_quiet(body())


def test_a_heartbeat_takes_a_stream_on_which_it_gets_away() -> None:
    async def body() -> None:
        stuck, closed, free = (Outbox(DOWN_HEARTBEAT) for _ in range(3))
        heard: list[str] = []
        never = asyncio.Event()

        async def write_free(_: Any) -> None:
            heard.append("free")

        writers = [asyncio.create_task(stuck.pump(lambda _: never.wait())), asyncio.create_task(free.pump(write_free))]
        stuck.put(DOWN_HEARTBEAT)
        closed.close()
        await closed.pump(write_free)
        assert not closed.beat()
        pulse = SharedPulse(dataclasses.replace(FAST, dead_after_s=30.0))
        with pulse.hear(Listener(stuck.beat)), pulse.hear(Listener(closed.beat)), pulse.hear(Listener(free.beat)):
            await until(lambda: len(heard) >= 5)
        assert len(stuck) == 0
        await cancel_and_wait(*writers)

    run_quiet(body())


def test_who_only_opens_streams_is_alive() -> None:
    async def body() -> None:
        p = Prefill(identity(epoch="e"))
        async with channels.open_channel(await p.start()) as channel:
            stub, calls = peer_pb2_grpc.PeerServiceStub(channel), list[grpc.aio.StreamStreamCall]()
            while len(calls) < 20:
                calls.append(stub.Prefill())
                await calls[-1].write(encode_down(opening(), epoch="e", now_s=0.0, pulse="shared"))
                await until(lambda: len(p.opened()) == len(calls))
                await asyncio.sleep(FAST.dead_after_s / 5)
            assert p.ends() == []
            await until(lambda: p.ends() == ["heartbeat"] * len(calls))
        await p.server.stop(0)

    run_quiet(body())


@pytest.mark.parametrize("where", ["on_quiet", "on_alive", "beat"])
def test_a_bug_of_one_listener_does_not_leave_the_others_waiting_for_ever(where: str) -> None:
    async def body() -> None:
        def fail(*_: Any) -> bool:
            raise RuntimeError("a bug")

        asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what["exception"]))
        told, pulse = list[object](), SharedPulse(FAST)
        pulse.heard()
        bad, good = (Listener(**{"beat": lambda: False, **changes}) for changes in ({where: fail}, {}))
        with pulse.hear(bad), pulse.hear(good):
            await until(good.silent.done)
            with pulse.hear(late := Listener(lambda: True)):
                await until(late.silent.done)
        gc.collect()
        assert {type(error) for error in told} == {RuntimeError}

    run_quiet(body())


@pytest.mark.parametrize("seed", range(2))
def test_whoever_comes_and_goes_hears_quiet_and_awake_in_turn_and_dies_only_after_quiet(seed: int) -> None:
    """Many streams that live for moments; the peer speaks, is quiet for a while, or dies."""
    config = dataclasses.replace(FAST, dead_after_s=1.0)

    async def body() -> None:
        chance, pulse = random.Random(seed), SharedPulse(config)
        heard, quiet_before_dead = list[list[bool]](), list[bool]()

        async def live(seconds: float) -> None:
            heard.append(mine := [])
            with pulse.hear(listener := Listener(lambda: chance.random() < 0.5, on_quiet=mine.append)):
                await asyncio.wait({listener.silent}, timeout=seconds)
            if listener.silent.done():
                quiet_before_dead.append(mine[-1:] == [True])

        async with asyncio.TaskGroup() as streams:
            for peer in ("speaks", "quiet", "speaks", "dies", "speaks", "quiet"):
                for _ in range(chance.randrange(5, 25)):
                    streams.create_task(live(chance.choice([0.0, 0.01, 0.1, 2.0])))
                    if peer == "speaks":
                        pulse.heard()
                    await asyncio.sleep(0.01)
                num_dead = len(quiet_before_dead)
                last = streams.create_task(live(10.0))
                if peer == "quiet":
                    await until(lambda: heard[-1])
                    streams.create_task(live(2.0))
                    await asyncio.sleep(0.01)
                    assert heard[-1] == [True], "it comes while the peer is quiet"
                    pulse.heard()
                elif peer == "dies":
                    await last
                    assert len(quiet_before_dead) > num_dead
        assert all(quiet_before_dead)
        assert max(len(mine) for mine in heard) > 1
        for mine in heard:
            assert mine == [number % 2 == 0 for number in range(len(mine))]

    run_quiet(body())


def test_who_comes_while_the_peer_is_quiet_is_told_so_and_when_it_is_back() -> None:
    async def body() -> None:
        pulse, early, late = SharedPulse(dataclasses.replace(FAST, dead_after_s=5.0)), list[bool](), list[bool]()
        with pulse.hear(Listener(lambda: True, on_quiet=early.append)):
            await until(lambda: early == [True])
            with pulse.hear(Listener(lambda: True, on_quiet=late.append)):
                assert late == [True]
                pulse.heard()
                assert (early, late) == ([True, False], [True, False])
        await asyncio.sleep(0)
        with pulse.hear(last := Listener(lambda: True, on_quiet=late.append)):  # counted anew
            await asyncio.sleep(FAST.dead_after_s)
            assert not last.silent.done()

    run_quiet(body())
