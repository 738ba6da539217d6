"""Prefill workers that D watches: down until they answer, passed over while they drain, forgotten when nobody asks them."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc
import pytest

from jdisagg.handoff.messages import Accepted, HandoffId
from tests.unit.ports import kept_port
from tests.unit.wire.peers import H1, H2, Decode, Prefill, opening
from tests.unit.wire.rig import identity, run_quiet, until


def test_a_failed_question_never_ends_the_streams_beside_it(monkeypatch):
    """A slow P misses a probe, or one of its streams dies: the other hand-offs on the connection go on."""

    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.open(address, H1, opening())
        await until(p.opened)

        p.service._identity = dataclasses.replace(p.service._identity, fingerprint="refuses every Hello from now on")
        monkeypatch.setattr("jdisagg.api.peer.presence.PROBE_INTERVAL_S", 0.05)
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
        monkeypatch.setattr("jdisagg.api.peer.presence.PROBE_INTERVAL_S", 0.05)
        with kept_port() as port:
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


@pytest.mark.usefixtures("own_log")
@pytest.mark.parametrize("fails", ["grpc.aio._channel.Channel.close", "jdisagg.api.peer.link.open_channel"])
def test_a_connection_that_cannot_be_replaced_does_not_end_the_questions(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Whatever comes out of gRPC there."""
    num_fails, closes = 0, fails.endswith("close")

    def fail(*_: object) -> None:
        nonlocal num_fails
        num_fails += 1
        raise OSError("a bug of gRPC")

    async def body() -> None:
        monkeypatch.setattr("jdisagg.api.peer.presence.PROBE_INTERVAL_S", 0.05)
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.watch((address,))
        await until(lambda: d.usable(address))
        with monkeypatch.context() as patch:
            patch.setattr(fails, fail)
            while num_fails < 3:
                if (link := d.client._links.find(address)) is not None:
                    d.client._failed(link, "a Hello that failed")
                await asyncio.sleep(0.02)
            await until(lambda: closes is d.usable(address) and not d.client._links._retiring)
        await until(lambda: d.usable(address))
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())
    bugs = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert bugs == ["a bug of gRPC"] * (num_fails if closes else 1)


def test_peers_that_nobody_asks_any_more_are_forgotten_with_their_connections():
    async def body() -> None:
        watched, old, d = Prefill(identity()), Prefill(identity()), Decode()
        addresses = [await p.start() for p in (watched, old)]
        d.client.watch((addresses[0],))
        d.client.open(addresses[1], H1, opening())
        d.client.no_kv("never spoken to", "its fetches stalled")
        await until(lambda: old.opened() and d.usable(addresses[0]))
        assert d.client.is_doubtful("never spoken to")
        d.client.offer(frozenset())
        assert set(d.client.failures()) == set(addresses), "a hand-off is open there"
        assert not d.client.is_doubtful("never spoken to")
        link = d.client._links.of(addresses[1])
        d.client.close(H1)
        await until(lambda: not d.client._streams)
        d.client.offer(frozenset())
        assert set(d.client.failures()) == {addresses[0]}
        await until(lambda: link._channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN)
        await until(lambda: not d.client._links._retiring)
        d.client.open(addresses[1], H2, opening())
        await until(lambda: len(old.opened()) == 2)
        await d.client.aclose()
        for p in (watched, old):
            await p.server.stop(0)

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
