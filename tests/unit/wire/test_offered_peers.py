"""Prefill workers that routers tell of: a decode worker finds out whether it reaches them before a request needs one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest

from jdisagg.api.peer.link import HelloFailed, PeerLink
from jdisagg.api.peer.ports import Reached
from jdisagg.core.errors import Unavailable
from jdisagg.handoff.identity import Identity
from tests.unit.ports import kept_port
from tests.unit.wire.peers import H1, H2, Decode, Prefill, opening
from tests.unit.wire.rig import identity, run_quiet, until


@pytest.fixture(autouse=True)
def _asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jdisagg.api.peer.presence.PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr("jdisagg.api.peer.presence.LOOK_S", 0.02)


async def tell(d: Decode, *peers: str) -> None:
    """As routers do, with every heartbeat."""
    while True:
        d.client.offer(frozenset(peers))
        await asyncio.sleep(0.02)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whom a Hello goes to."""
    peers, hello = list[str](), PeerLink.hello

    async def counted(link: PeerLink, *, again: bool = False) -> Identity:
        peers.append(link.peer)
        return await hello(link, again=again)

    monkeypatch.setattr(PeerLink, "hello", counted)
    return peers


@pytest.mark.covers("C12")
def test_one_that_is_not_reached_is_known_without_a_hand_off_and_asked_until_it_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        with kept_port() as port:
            address = f"127.0.0.1:{port}"
            telling = asyncio.create_task(tell(d, address))
            await until(lambda: d.client.is_down(address))
            await asyncio.sleep(0.3)
            await p.start(port)
        await until(lambda: d.usable(address))
        assert not d.client.is_down(address)
        telling.cancel()
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())
    told = [record.getMessage() for record in caplog.records if "prefill peer" in record.getMessage()]
    assert len(told) == 2, told
    assert "is down" in told[0]
    assert told[0].endswith("look at its --advertise-host and --advertise-port, and at firewalls")
    assert told[1].endswith("answers again")


def test_one_that_answers_is_asked_once_for_a_while_and_again_when_it_failed(asked: list[str]) -> None:

    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        telling = asyncio.create_task(tell(d, address))
        await until(lambda: d.usable(address))
        await asyncio.sleep(0.3)
        assert asked == [address]
        d.client.open(address, H1, opening())
        await until(p.opened)
        await p.server.stop(0)
        await until(lambda: d.client.is_down(address))
        await until(lambda: len(asked) > 4)
        again = Prefill(identity(epoch="again"))
        await again.start(int(address.rpartition(":")[2]))
        await until(lambda: d.usable(address))
        telling.cancel()
        await d.client.aclose()
        await again.server.stop(0)

    run_quiet(body())


def test_one_that_goes_away_while_nothing_is_asked_of_it_is_known_to_be_down_soon_and_one_that_a_stream_hears_is_left_alone(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jdisagg.api.peer.presence.AGAIN_S", 0.1)

    async def body() -> None:
        idle, busy, d = Prefill(identity()), Prefill(identity()), Decode()
        addresses = [await p.start() for p in (idle, busy)]
        d.client.open(addresses[1], H1, opening())
        await until(busy.opened)
        telling = asyncio.create_task(tell(d, *addresses))
        await until(lambda: len(asked) > 4)
        assert asked.count(addresses[1]) == 1, "by its hand-off"
        await idle.server.stop(0)
        await until(lambda: d.client.is_down(addresses[0]))
        assert d.usable(addresses[1])
        telling.cancel()
        await d.client.aclose()
        await busy.server.stop(0)

    run_quiet(body())


def test_one_that_fails_while_no_router_speaks_is_asked_until_it_answers(asked: list[str]) -> None:
    """They may all be away, and D serves its own clients."""

    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.offer(frozenset((address,)))
        await until(lambda: d.usable(address))
        d.client.open(address, H1, opening())
        await until(p.opened)
        await p.server.stop(0)
        await until(lambda: d.client.is_down(address))
        before = len(asked)
        await until(lambda: len(asked) > before + 2)
        again = Prefill(identity(epoch="again"))
        await again.start(int(address.rpartition(":")[2]))
        await until(lambda: d.usable(address))
        assert not d.client.is_down(address)
        await d.client.aclose()
        await again.server.stop(0)

    run_quiet(body())


def test_one_that_goes_away_while_nobody_speaks_is_known_to_be_down_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jdisagg.api.peer.presence.AGAIN_S", 0.1)

    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.offer(frozenset((address,)))
        await until(lambda: d.usable(address))
        await p.server.stop(0)
        await until(lambda: d.client.is_down(address))
        assert not d.usable(address)
        await d.client.aclose()

    run_quiet(body())


@pytest.mark.parametrize("answers", [True, False])
def test_one_that_is_not_offered_any_more_is_not_asked_again_and_leaves_nothing(
    answers: bool, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, reach = asyncio.Event(), PeerLink.reach

    async def late(link: PeerLink, theirs: Identity, *, begins: bool) -> Reached:
        await answered.wait()
        if not answers:
            raise HelloFailed("unreachable", Unavailable("it went away"))
        return await reach(link, theirs, begins=begins)

    monkeypatch.setattr(PeerLink, "reach", late)

    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.offer(frozenset((address,)))
        await until(lambda: asked)
        d.client.offer(frozenset())
        answered.set()
        await until(lambda: d.client._links.find(address) is None)
        assert d.client.failures() == {}
        await until(lambda: not d.client._links._retiring)
        await until(lambda: not d.client._tasks)  # not even one that looks whether there is anybody
        assert asked == [address]
        d.client.offer(frozenset((address,)))
        d.client.offer(frozenset())  # before it was asked
        await until(lambda: not d.client._tasks)
        assert asked == [address]
        assert d.client._links.find(address) is None
        d.client.offer(frozenset((address,)))
        await until(lambda: len(asked) > 1)
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_one_that_is_silent_is_asked_one_question_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, most = list[str](), 0

    async def never(link: PeerLink, *, again: bool = False) -> Identity:
        nonlocal most
        waiting.append(link.peer)
        most = max(most, len(waiting))
        try:
            return await asyncio.Future[Identity]()
        finally:
            waiting.pop()

    monkeypatch.setattr(PeerLink, "hello", never)

    async def body() -> None:
        d = Decode()
        telling = asyncio.create_task(tell(d, "127.0.0.1:1", "127.0.0.1:2"))
        await until(lambda: len(waiting) == 2)
        await asyncio.sleep(0.2)
        telling.cancel()
        await d.client.aclose()

    run_quiet(body())
    assert most == 2


def test_one_is_kept_without_hand_offs_while_it_is_offered_and_forgotten_then() -> None:
    async def body() -> None:
        offered, other, d = Prefill(identity()), Prefill(identity()), Decode()
        addresses = [await p.start() for p in (offered, other)]
        d.client.offer(frozenset(addresses))
        await until(lambda: all(d.usable(address) for address in addresses))
        d.client.open(addresses[1], H1, opening("r1"))
        await until(other.opened)
        assert set(d.client.failures()) == set(addresses)
        link = d.client._links.of(addresses[0])
        d.client.offer(frozenset(addresses[1:]))
        assert set(d.client.failures()) == {addresses[1]}
        await until(lambda: link._channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN)
        d.client.offer(frozenset())
        assert set(d.client.failures()) == {addresses[1]}, "a hand-off is open there"
        d.client.open(addresses[1], H2, opening("r2"))
        await until(lambda: len(other.opened()) == 2)
        await d.client.aclose()
        d.client.offer(frozenset(addresses))  # the heartbeats end after the connections
        for p in (offered, other):
            await p.server.stop(0)

    run_quiet(body())


def test_one_that_nobody_asks_again_is_not_down_for_good() -> None:
    async def body() -> None:
        d = Decode()
        with kept_port() as port:
            address = f"127.0.0.1:{port}"
            d.client.open(address, H1, opening())
            await until(lambda: d.ends(H1))
            assert d.client.is_doubtful(address)
            assert not d.client.is_down(address), "only another hand-off would find out that it is there"
            d.client.offer(frozenset((address,)))
            assert d.client.is_down(address)
        await d.client.aclose()

    run_quiet(body())


@pytest.mark.parametrize("is_named", [False, True])
def test_an_address_that_leads_to_another_worker_than_the_one_registered_there_is_down_unless_the_command_line_names_it(
    is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        other, d = Prefill(identity(worker="pid 6856 @ 10.44.0.2:9001")), Decode()
        address = await other.start()
        if is_named:  # by what its operator calls it
            d.client.watch((address,))
        telling = asyncio.create_task(tell(d, address))
        await until(lambda: address in d.client.failures())
        d.client.open(address, H1, opening())
        await until(lambda: other.opened() or d.ends(H1))
        await asyncio.sleep(0.2)
        telling.cancel()
        if is_named:
            assert d.usable(address)
        else:
            assert d.client.is_down(address)
            assert d.client.is_doubtful(address)
            assert d.ends(H1) == ["hello"]
            assert not other.opened()
            (line,) = [record.getMessage() for record in caplog.records if record.name == "jdisagg.api.peer.book"]
            assert line.startswith(f"prefill peer {address} does not pair with us: it leads to pid 6856 @ 10.44.0.2:9001; ")
            assert line.endswith("; look at --advertise-host of the worker that registered there")
        await d.client.aclose()
        await other.server.stop(0)

    run_quiet(body())


@pytest.mark.parametrize("says", ["itself", "nothing of the kind"])
def test_one_that_answers_under_the_address_it_registered_is_taken_and_so_is_one_that_does_not_say_which(says: str) -> None:
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        worker = f"pid 12 @ {address}" if says == "itself" else "somebody @ somewhere:12"
        p.service._identity = replace(p.service._identity, worker=worker)
        d.client.offer(frozenset((address,)))
        await until(lambda: address in d.client.failures())
        assert d.usable(address)
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_an_answer_from_before_a_connection_broke_says_nothing_of_the_peer_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    proven, reach = asyncio.Event(), PeerLink.reach

    async def late(link: PeerLink, theirs: Identity, *, begins: bool) -> Reached:
        await proven.wait()
        return await reach(link, theirs, begins=begins)

    monkeypatch.setattr(PeerLink, "reach", late)

    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.offer(frozenset((address,)))
        link = d.client._links.of(address)
        await until(lambda: link._hello is not None and link._hello.done())
        await p.server.stop(0)
        d.client._failed(link, "a stream broke")
        proven.set()
        await until(lambda: not d.client._presence._asking)
        assert d.client.is_down(address)
        await d.client.aclose()

    run_quiet(body())
