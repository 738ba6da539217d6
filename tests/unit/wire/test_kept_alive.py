"""What a worker does for as long as it lives outlasts an error that nobody expected."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from jdisagg.api.fleet.client import FleetClient
from jdisagg.api.peer.link import PeerLink
from jdisagg.core.config import TransferConfig
from jdisagg.core.fleet import Load, Member, Report
from jdisagg.handoff.identity import Identity
from jdisagg.router.entry import Entry
from jdisagg.router.service import FleetService
from jdisagg.v1 import fleet_pb2_grpc
from tests.unit.wire.peers import Decode, Prefill
from tests.unit.wire.rig import FAST, identity, member, run_quiet, start_server, until

MEMBER = member()


class Members:
    """Workers of a router that count."""

    def __init__(self) -> None:
        self.fleet = SimpleNamespace(prefill_for=lambda entry: ("p:1",))
        self.registered = 0
        self.beats = 0

    def register(self, member: Member) -> None:
        self.registered += 1

    def heartbeat(self, address: str, epoch: str, report: Report) -> Entry:
        self.beats += 1
        return Entry(MEMBER, 0.0)

    def members(self) -> list[Member]:
        return []


@pytest.mark.usefixtures("own_log")
def test_a_watched_peer_is_asked_again_after_an_error_that_nobody_expected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        monkeypatch.setattr("jdisagg.api.peer.presence.PROBE_INTERVAL_S", 0.05)
        hello, asked = PeerLink.hello, []

        async def break_once(link: PeerLink, *, again: bool = False) -> Identity:
            asked.append(link)
            if len(asked) == 1:
                raise TypeError("our bug")
            return await hello(link, again=again)

        monkeypatch.setattr(PeerLink, "hello", break_once)
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.watch((address,))
        await until(lambda: d.client.failures().get(address) == "TypeError('our bug')")
        assert d.client.is_down(address)
        await until(lambda: d.usable(address))
        assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [TypeError]
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


@pytest.mark.usefixtures("own_log")
@pytest.mark.parametrize("broken", ["state", "on_prefill"])
def test_a_worker_registers_again_after_an_error_that_nobody_expected(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        monkeypatch.setattr("jdisagg.api.fleet.client.AFTER_BUG_S", 0.05, raising=False)
        members, failing = Members(), asyncio.Event()

        def fail(what: str) -> None:
            if failing.is_set() and what == broken:
                failing.clear()
                raise KeyError("our bug")

        def state() -> Report:
            fail("state")
            return Report(Load())

        def learn(router: str, peers: tuple[str, ...]) -> None:
            fail("on_prefill")

        service = FleetService(members, FAST)
        server, router = await start_server(lambda s: fleet_pb2_grpc.add_FleetServiceServicer_to_server(service, s))
        client = FleetClient(MEMBER, (router,), state=state, on_prefill=learn)
        await until(lambda: members.beats > 2)
        failing.set()
        await until(lambda: not failing.is_set() and members.registered == 2)
        beats = members.beats
        await until(lambda: members.beats > beats + 2)
        assert client.registered() == {router: True}
        assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [KeyError]
        failing.set()
        await client.announce()
        await client.close()
        await server.stop(0)

    run_quiet(body())


@pytest.mark.parametrize(
    ("ours", "slow"),
    [
        (TransferConfig(heartbeat_s=0.02, dead_after_s=0.09), "router 127.0.0.1:"),
        (TransferConfig(heartbeat_s=0.3, dead_after_s=9.0), "this worker has --heartbeat-s 0.3"),
        (FAST, None),
    ],
)
def test_who_beats_more_slowly_than_the_other_waits_is_told_of(
    ours: TransferConfig, slow: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        members = Members()
        service = FleetService(members, FAST)
        server, router = await start_server(lambda s: fleet_pb2_grpc.add_FleetServiceServicer_to_server(service, s))
        client = FleetClient(MEMBER, (router,), state=lambda: Report(Load()), config=ours)
        await until(lambda: members.beats > 0)
        told = [record.getMessage() for record in caplog.records if "--dead-after-s" in record.getMessage()]
        assert (not told) if slow is None else (len(told) == 1 and told[0].startswith(slow)), told
        await client.close()
        await server.stop(0)

    run_quiet(body())
