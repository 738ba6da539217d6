"""What ends when a peer is slow, refuses a hand-off, says one thing wrong, or is gone: no more than has to."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc
import pytest

from jdisagg.api.peer import link as peer_link
from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import HandoffLost
from jdisagg.handoff.messages import Accepted, HandoffId, StreamEnded
from jdisagg.v1 import peer_pb2
from tests.unit.wire.peers import CHUNK, H1, H2, Decode, Prefill, opening
from tests.unit.wire.rig import FAST, identity, run_quiet, until

ACCEPTED = Accepted(cached_tokens=0)
PATIENT = TransferConfig(heartbeat_s=0.05, dead_after_s=30.0)


async def begun(d: Decode, p: Prefill, address: str, *handoffs: HandoffId) -> None:
    """These hand-offs, until P has answered them."""
    for handoff in handoffs:
        before = len(p.opened())
        d.client.open(address, handoff, opening(str(handoff.serial)))
        await until(lambda before=before: len(p.opened()) > before)
        p.opened()[-1].reply.send(ACCEPTED)
        await until(lambda handoff=handoff: d.messages(handoff))


class Slow(Prefill):
    """A P that answers a Hello after `late_s`."""

    def __init__(self, config: TransferConfig = FAST) -> None:
        super().__init__(identity(), config)
        self.late_s, self.num_asked = 0.0, 0
        self._hello = self.service.Hello
        self.service.Hello = self._late

    async def _late(self, request: peer_pb2.HelloRequest, context: Any) -> peer_pb2.HelloResponse:
        self.num_asked += 1
        await asyncio.sleep(self.late_s)
        return await self._hello(request, context)


@pytest.mark.parametrize("alone", [False, True])
def test_a_message_that_cannot_be_read_ends_its_hand_off_and_nothing_else(
    alone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        await begun(d, p, address, *((H1,) if alone else (H1, H2)))
        p.opened()[0].reply.send(dataclasses.replace(CHUNK, shape=(2, 2, 2)))
        await until(lambda: d.ends(H1))
        (ended,) = [message for message in d.messages(H1) if isinstance(message, StreamEnded)]
        assert (ended.reason, type(ended.error)) == ("unreadable", HandoffLost)
        await asyncio.sleep(0.1)
        assert d.usable(address)
        assert d.ends(H2) == []
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())
    assert "is down" not in caplog.text


def test_a_hello_that_comes_late_ends_no_stream_that_hears_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jdisagg.api.peer.presence.PROBE_INTERVAL_S", 0.05)

    async def body() -> None:
        p, d = Slow(), Decode()
        address = await p.start()
        await begun(d, p, address, H1)
        p.late_s = 60.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer_link, "HELLO_TIMEOUT_S", 0.3)
            d.client.watch((address,))
            await until(lambda: not d.usable(address))
            asked = p.num_asked
            await until(lambda: p.num_asked > asked + 2)  # over one connection after the other
        assert d.ends(H1) == []
        (of_h1, *_) = [link for link in d.client._links._retiring if link.is_used]
        d.client.close(H1)
        await until(lambda: of_h1._channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN)
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_a_hello_may_take_as_long_as_a_silent_peer_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jdisagg.api.peer.presence.PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr(peer_link, "HELLO_TIMEOUT_S", 0.1)

    async def body() -> None:
        p, d = Slow(PATIENT), Decode(config=PATIENT)
        p.late_s = 0.3
        address = await p.start()
        d.client.watch((address,))
        await until(lambda: address in d.client.failures())
        assert d.usable(address)
        await until(lambda: p.num_asked > 2)
        assert d.usable(address)
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body(), patient=False)


def test_a_stream_on_a_connection_that_was_given_up_finds_out_that_the_peer_is_gone() -> None:
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        await begun(d, p, address, H1, H2)
        d.client._failed(d.client._links.of(address), "a Hello that failed")
        await asyncio.sleep(0.1)
        assert d.ends(H1) == d.ends(H2) == []
        await p.server.stop(0)
        await until(lambda: d.ends(H1) and d.ends(H2))
        assert d.ends(H1) == d.ends(H2) == ["dead"]
        await d.client.aclose()

    run_quiet(body())


def test_a_stream_that_a_peer_refuses_at_once_ends_none_of_those_that_it_has_taken_on() -> None:
    """As one does that stops, and finishes what it has."""

    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        await begun(d, p, address, H1)
        await d.client._links.of(address).hello()
        stopping = asyncio.create_task(p.server.stop(20.0))
        await asyncio.sleep(0.1)
        d.client.open(address, H2, opening("2"))
        await until(lambda: d.ends(H2))
        assert not d.usable(address)
        assert d.ends(H1) == []
        await d.client.aclose()
        await stopping

    run_quiet(body())
