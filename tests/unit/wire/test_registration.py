"""A worker is a member of a router's fleet for as long as its heartbeats come, and registers again where they are not known."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address

import grpc
import grpc.aio
import pytest

from jdisagg.api import channels
from jdisagg.api.fleet import client, elsewhere
from jdisagg.api.fleet.client import NO_ROUTER
from jdisagg.api.fleet.codec import decode_member, encode_member
from jdisagg.api.fleet.elsewhere import nobody_reaches
from jdisagg.api.http.server import HttpServer
from jdisagg.api.http.staged import StagedApp
from jdisagg.api.listening import listen
from jdisagg.core.host_names import Address
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.router import service
from jdisagg.router.entrance import Entrance
from jdisagg.v1 import fleet_pb2, fleet_pb2_grpc
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.wire.rig import FAST, IMPATIENT, member, run_quiet, until


@pytest.mark.covers("C12", "X25", "X12")
def test_workers_register_heartbeat_and_register_again():
    async def body() -> None:
        router = await Router().start()
        port = int(router.address.rpartition(":")[2])
        channel = channels.open_channel(router.address)
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="register again") as caught:
            await stub.Heartbeat(fleet_pb2.HeartbeatRequest(address="nobody:1", epoch="e"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError, match="janitor"):
            await stub.Register(fleet_pb2.RegisterRequest(member=fleet_pb2.Member(role="janitor")))
        worker = await FakeWorker((router.address,), Role.PREFILL).start()
        await until(router.engine.workers.members)
        (found,) = [decode_member(item) for item in (await stub.List(fleet_pb2.ListRequest())).members]
        assert (found.role, found.address, found.card.vocab_size) == (Role.PREFILL, worker.address, 1000)
        await asyncio.sleep(2 * FAST.dead_after_s)
        assert router.engine.workers.members()  # heartbeats keep it
        await channel.close()
        await router.stop()
        await until(lambda: not worker.registration.registered()[router.address])
        again = await Router(config=IMPATIENT).start(port)
        await until(again.engine.workers.members)
        await worker.die()
        await until(lambda: not again.engine.workers.members())  # evicted
        await again.stop()

    run_quiet(body())


def test_a_worker_whose_router_is_none_says_so_once_and_what_to_change(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        caplog.clear()
        other = await FakeWorker(()).start()
        worker = await FakeWorker((other.address,)).start()
        await until(lambda: "does not take this worker" in caplog.text)
        await asyncio.sleep(0.6)  # it tries again
        own = [record for record in caplog.records if record.name == "jdisagg.api.fleet.client"]
        said = [(record.levelname, record.getMessage()) for record in own]
        assert said == [("ERROR", f"router {other.address} does not take this worker: {NO_ROUTER}; registering until it does")]
        assert "--router" in NO_ROUTER
        assert worker.registration.refusal() == f"router {other.address} does not take this worker: {NO_ROUTER}"
        for one in (worker, other):
            await one.die()

    run_quiet(body())


def test_a_worker_that_some_router_takes_is_refused_by_none() -> None:
    async def body() -> None:
        other = await FakeWorker(()).start()
        router = await Router().start()
        port = int(router.address.rpartition(":")[2])
        worker = await FakeWorker((other.address, router.address), text_digest="1" * 64).start()
        await until(router.engine.workers.members)
        await asyncio.sleep(0.3)  # the other one has answered, too
        assert worker.registration.refusal() == ""
        await router.stop()
        await until(lambda: not worker.registration.registered()[router.address])
        assert worker.registration.refusal() == "", "it may come back"
        again = await Router(entrance=Entrance("0" * 64)).start(port)
        await until(worker.registration.refusal)
        await again.stop()
        assert worker.registration.refusal(), "nobody said otherwise"
        again = await Router().start(port)
        await until(lambda: not worker.registration.refusal())
        await again.stop()
        for one in (worker, other):
            await one.die()

    run_quiet(body())


def test_routers_that_refused_a_worker_and_have_gone_for_good_do_not_keep_it_from_being_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        monkeypatch.setattr(client, "REFUSED_S", 1.0)
        router = await Router(entrance=Entrance("0" * 64)).start()
        port = int(router.address.rpartition(":")[2])
        worker = await FakeWorker((router.address,), text_digest="1" * 64).start()
        await until(worker.registration.refusal)
        await asyncio.sleep(1.5)
        await until(worker.registration.refusal)  # it says so again and again, as soon as this process has a turn
        await router.stop()
        await until(lambda: not worker.registration.refusal())
        again = await Router(entrance=Entrance("0" * 64)).start(port)
        await until(worker.registration.refusal)
        assert worker.registration.registered() == {router.address: False}
        await again.stop()
        await worker.die()

    run_quiet(body())


def test_a_worker_that_is_given_an_http_port_for_a_router_is_told_that_and_not_what_grpc_makes_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        server = HttpServer(StagedApp(), listen())
        await server.start()
        worker = await FakeWorker((server.address,)).start()
        await until(worker.registration.refusal)
        why = f"it {channels.NO_GRPC}"
        told = f"router {server.address} does not take this worker: {why}"
        assert worker.registration.refusal() == told
        await asyncio.sleep(1.0)  # it tries again
        said = [record.getMessage() for record in caplog.records if record.name == client.__name__]
        assert said == [f"{told}; registering until it does"]
        await worker.die()
        await server.stop(0.0)

    run_quiet(body())


def test_metrics_of_a_worker_tell_how_many_of_its_routers_have_it() -> None:
    async def body() -> None:
        metrics = Metrics()

        def shown() -> list[float]:
            lines = [line.rpartition(" ") for line in metrics.text().splitlines() if line.startswith("jdisagg_routers")]
            found = {name: float(value) for name, _, value in lines}
            return [found.get(f'jdisagg_routers{{state="{state}"}}', -1.0) for state in ("registered", "not_registered")]

        one, other = await Router().start(), await Router().start()
        worker = await FakeWorker((one.address, other.address), Role.PREFILL).start()
        assert shown() == [-1.0, -1.0], "one that has no routers shows no number of them"
        worker.registration.show_in(metrics.fleet.routers)
        await until(lambda: shown() == [2.0, 0.0])
        await other.stop()
        await until(lambda: shown() == [1.0, 1.0])
        await worker.die()
        await one.stop()

    run_quiet(body())


@pytest.mark.parametrize("address", ["127.0.0.1:9001", "[::1]:9001", "localhost:9001", "127.8.8.8:9001"])
@pytest.mark.parametrize("caller", ["ipv4:203.0.113.7:41234", "ipv6:%5B2001:db8::7%5D:41234", "ipv6:[::ffff:203.0.113.7]:4123"])
def test_a_worker_of_another_machine_that_calls_itself_127_0_0_1_is_told_what_to_change(address: str, caller: str) -> None:
    why = nobody_reaches(address, caller)
    there = "203.0.113.7" if "203.0.113.7" in caller else "2001:db8::7"
    host = address.rpartition(":")[0]
    assert why.startswith(
        f"it is on another host ({there}) and registered as {address}: for everybody else {host} is their own"
    )
    assert f"--advertise-host {there}" in why, "the likely address, to copy"
    assert "--host 0.0.0.0" in why


@pytest.mark.parametrize(
    ("address", "caller"),
    [
        ("127.0.0.1:9001", "ipv4:127.0.0.1:41234"),
        ("127.0.0.1:9001", "ipv6:%5B::1%5D:41234"),
        ("127.0.0.1:9001", "ipv6:%5B::ffff:127.0.0.1%5D:41234"),
        ("127.0.0.1:9001", "unix:/tmp/socket"),
        ("127.0.0.1:9001", ""),
        ("10.0.0.7:9001", "ipv4:203.0.113.7:41234"),
        ("worker-0:9001", "ipv4:203.0.113.7:41234"),
    ],
)
def test_who_is_on_this_machine_or_has_another_address_is_taken(address: str, caller: str) -> None:
    assert nobody_reaches(address, caller) == ""


def test_a_worker_that_calls_from_an_address_of_this_machine_is_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = list[str]()

    def is_own(address: Address) -> bool:
        ours.append(address.sockaddr[0])
        return True

    monkeypatch.setattr(elsewhere, "is_own", is_own)
    assert nobody_reaches("127.0.0.1:9001", "ipv4:203.0.113.7:41234") == ""
    assert ours == ["203.0.113.7"]


def test_a_worker_that_nobody_reaches_does_not_register_and_both_logs_say_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(elsewhere, "_caller_ip", lambda caller: ip_address("203.0.113.7"))

    async def body() -> None:
        caplog.clear()
        router = await Router().start()
        worker = await FakeWorker((router.address,), Role.PREFILL).start()
        await until(lambda: sum("--advertise-host" in record.getMessage() for record in caplog.records) >= 2)
        await asyncio.sleep(0.6)  # it tries again
        assert router.engine.workers.members() == []
        said = [(record.name, record.getMessage()) for record in caplog.records if "--advertise-host" in record.getMessage()]
        assert [name for name, _ in said] == ["jdisagg.router.service", "jdisagg.api.fleet.client"]
        assert said[0][1].startswith(f"prefill worker: it is on another host (203.0.113.7) and registered as {worker.address}")
        assert said[1][1].startswith(f"router {router.address} does not take this worker: it is on another host (203.0.113.7)")
        await worker.die()
        await router.stop()

    run_quiet(body())


def test_the_router_tells_of_each_worker_that_it_turns_away_by_itself_and_of_many_in_few_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(elsewhere, "_caller_ip", lambda caller: ip_address("203.0.113.7"))
    now = {"s": 100.0}
    monkeypatch.setattr(service, "monotonic", lambda: now["s"])

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == service.__name__]

    async def body() -> None:
        caplog.clear()
        router = await Router().start()
        channel = channels.open_channel(router.address)
        stub = fleet_pb2_grpc.FleetServiceStub(channel)

        async def comes(role: Role, address: str) -> None:
            with pytest.raises(grpc.aio.AioRpcError, match="another host"):
                await stub.Register(fleet_pb2.RegisterRequest(member=encode_member(member(role=role, address=address))))

        for _ in range(3):
            await comes(Role.DECODE, "127.0.0.1:9001")
        await comes(Role.PREFILL, "127.0.0.1:9001")
        assert [line.split()[0] for line in said()] == ["decode", "prefill"]
        now["s"] += service.TOLD_EVERY_S
        for role in (Role.DECODE, Role.PREFILL):
            await comes(role, "127.0.0.1:9001")
        assert [line.endswith("; 2 more since it was last said") for line in said()[2:]] == [True, False]
        for port in range(100):
            await comes(Role.DECODE, f"127.0.0.1:{port}")
        assert len(said()) <= 4 + service.TOLD_APART + 1
        assert said()[-1].startswith("one of several, a decode worker: it is on another host")
        await channel.close()
        await router.stop()

    run_quiet(body())
