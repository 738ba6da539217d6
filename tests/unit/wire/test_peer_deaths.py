"""A peer that dies, is silent or cannot be reached is noticed in time, and who comes back at its address is greeted anew."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from typing import Any

import pytest
from chaos_kit.proxy import Proxy

from jdisagg.api.peer.client import GrpcPeerClient
from jdisagg.api.peer.piece_server import add_peer_service
from jdisagg.api.peer.server import PeerServer
from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import Unavailable
from jdisagg.handoff.messages import Accepted, Agreed, Awake, Grant, Lives, Quiet, Refused, StreamEnded
from tests.unit.wire.peers import H1, H2, Decode, Prefill, lost, opening
from tests.unit.wire.rig import FAST, WAIT_LIMIT_S, identity, run_quiet, start_server, until


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


@pytest.mark.covers("C04")
@pytest.mark.parametrize("answers", [False, True])
def test_a_prefill_worker_that_goes_down_with_what_it_has_taken_died_if_only_before_its_engine_said_a_word(answers: bool):
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.open(address, H1, opening())
        await until(p.opened)
        if answers:
            p.opened()[0].reply.send(Accepted(cached_tokens=0))
            await until(lambda: d.messages(H1))
        await p.server.stop(0)
        await until(lambda: d.ends(H1))
        d.client.open(address, H2, opening())
        await until(lambda: d.ends(H2))
        ends = [(end.reason, end.is_death) for end in (d.messages(H1)[-1], d.messages(H2)[-1]) if isinstance(end, StreamEnded)]
        assert ends == [("dead", True), ("unreachable", False)]
        await d.client.aclose()

    run_quiet(body())


def test_a_prefill_worker_whose_time_to_drain_is_over_has_not_gone_down_with_what_is_left():
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        for handoff in (H1, H2):
            d.client.open(address, handoff, opening())
        await until(lambda: len(p.opened()) == 2)
        p.opened()[0].reply.send(Accepted(cached_tokens=0))  # the other one waits for its turn
        await until(lambda: any(d.messages(handoff) for handoff in (H1, H2)))
        p.service.drain()
        p.service.send_away()
        await p.server.stop(WAIT_LIMIT_S)  # it waits for the streams
        await until(lambda: d.ends(H1) and d.ends(H2))
        for handoff in (H1, H2):
            *_, refused, ended = d.messages(handoff)
            assert isinstance(refused, Refused)
            assert isinstance(refused.error, Unavailable)
            assert isinstance(ended, StreamEnded)
            assert (ended.reason, ended.is_death) == ("closed", False)
        assert (p.ends(), p.service.num_streams) == (["closed", "closed"], 0)
        await d.client.aclose()

    run_quiet(body())


def test_who_comes_to_a_prefill_worker_whose_engine_has_raised_does_not_go_down_with_it():
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.open(address, H1, opening())
        await until(p.opened)
        p.service._is_over = lambda: True
        d.client.open(address, H2, opening())
        await until(lambda: d.ends(H2))
        assert len(p.opened()) == 1, "its engine would not look at it any more"
        await p.server.stop(0)
        await until(lambda: d.ends(H1))
        ends = [(end.reason, end.is_death) for end in (d.messages(H1)[-1], d.messages(H2)[-1]) if isinstance(end, StreamEnded)]
        assert ends == [("dead", True), ("dead", False)]
        await d.client.aclose()

    run_quiet(body())


def test_a_prefill_worker_that_never_read_what_it_is_asked_did_not_die_of_it():
    async def body() -> None:
        silent, d = _Silent(identity(), post=lambda event: None, pieces={}, config=FAST), Decode()
        server, address = await start_server(lambda server: add_peer_service(silent, server))
        d.client.open(address, H1, opening())
        await until(lambda: d.ends(H1))
        assert d.messages(H1)[-1].reason == "heartbeat"
        assert not d.messages(H1)[-1].is_death
        await d.client.aclose()
        await server.stop(0)

    run_quiet(body())


@pytest.mark.parametrize("restarted", [False, True])
def test_a_prefill_worker_whose_connection_was_cut_is_told_to_live_once_it_answers_as_the_same_process(restarted: bool):
    async def body() -> None:
        p, d, proxy = Prefill(identity()), Decode(), await Proxy(lambda *_: None).start()
        proxy.target_port = int((await p.start()).rpartition(":")[2])
        address = f"127.0.0.1:{proxy.port}"
        for handoff in (H1, H2):
            d.client.open(address, handoff, opening())
        await until(lambda: len(p.opened()) == 2)
        for opened in p.opened():
            opened.reply.send(Accepted(cached_tokens=0))
        await until(lambda: d.messages(H1) and d.messages(H2))
        if restarted:
            p.service._identity = dataclasses.replace(p.service._identity, epoch="epoch-2")
        proxy.cut()
        await until(lambda: d.ends(H1) and d.ends(H2))
        assert all(d.messages(handoff)[-1].is_death for handoff in (H1, H2)), "known at once, as of one that is gone"
        await until(lambda: (link := d.client._links.find(address)) and link._hello and link._hello.done())
        await asyncio.sleep(0.05)
        told = sorted((event.handoff.serial, event.message) for event in d.events if isinstance(event.message, Lives))
        assert told == ([] if restarted else [(handoff.serial, Lives(address)) for handoff in (H1, H2)])
        await d.client.aclose()
        await p.server.stop(0)
        await proxy.close()

    run_quiet(body())


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
        await lost(d, address)
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
    """A cancelled or hedged hand-off may be the only one that finds out."""

    async def body() -> None:
        silent = _Silent(identity(), post=lambda event: None, pieces={}, config=FAST)
        server, address = await start_server(lambda server: add_peer_service(silent, server))
        loop = asyncio.get_running_loop()
        client = GrpcPeerClient(identity(epoch="d"), loop=loop, post=lambda event: None, config=FAST)
        client.open(address, H1, opening())
        await until(lambda: client.failures() == {address: ""})
        if closed:
            client.close(H1)
        took_s = await until(lambda: client.failures()[address])
        assert took_s < 3 * FAST.dead_after_s
        await client.aclose()
        await server.stop(0)

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


def test_a_taken_port_is_a_clear_error():
    async def body() -> None:
        p = Prefill(identity())
        address = await p.start()
        with pytest.raises(Exception, match="cannot listen on"):
            await Prefill(identity()).start(port=int(address.rpartition(":")[2]))
        await p.server.stop(0)

    run_quiet(body())
