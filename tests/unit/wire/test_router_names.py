"""A name with several addresses is several routers, and a worker registers with each of them as they come and go."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc.aio
import pytest

from jdisagg.api.fleet.client import FleetClient
from jdisagg.api.fleet.router_names import routers_at
from jdisagg.core.fleet import Load, Report
from jdisagg.core.host_names import Address
from jdisagg.router.service import FleetService
from jdisagg.v1 import fleet_pb2_grpc
from tests.unit.wire.rig import FAST, run_quiet, start_server, until
from tests.unit.wire.test_kept_alive import MEMBER, Members

NAME = ("routers:9000",)
A, B = Address(socket.AF_INET, ("10.0.0.1", 0)), Address(socket.AF_INET, ("10.0.0.2", 0))
A6, B6 = Address(socket.AF_INET6, ("fd00::1", 0, 0, 0)), Address(socket.AF_INET6, ("fd00::2", 0, 0, 0))
BOTH, BOTH6 = ("10.0.0.1:9000", "10.0.0.2:9000"), ("[fd00::1]:9000", "[fd00::2]:9000")


@pytest.mark.parametrize(
    ("found", "before", "wanted"),
    [
        ([A], NAME, NAME),
        ([A, A6], NAME, NAME),  # localhost
        ([], NAME, NAME),
        ([A, B], NAME, BOTH),
        ([B, A, A], BOTH, BOTH),
        ([A6, B6], NAME, BOTH6),
        ([A6, A, B6, B], BOTH, BOTH),  # not the same ones once more
        ([A6, A, B6, B], BOTH6, BOTH6),
        ([A6, A, B], NAME, BOTH),
        ([B], BOTH, ("10.0.0.2:9000",)),  # a rollout's end
        ([], BOTH, BOTH),
    ],
)
def test_several_addresses_of_a_family_are_several_routers(
    found: list[Address], before: tuple[str, ...], wanted: tuple[str, ...]
) -> None:
    assert routers_at("routers:9000", found, before) == wanted


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Names have these addresses from now on, and are looked up often."""
    monkeypatch.setattr("jdisagg.api.fleet.client.LOOK_S", 0.2)
    monkeypatch.setattr("jdisagg.api.fleet.client.LOOK_SOON_S", 0.1)
    monkeypatch.setattr("jdisagg.api.fleet.router_names.LOOK_SOON_S", 0.1)
    known: list[str] = []

    def getaddrinfo(host: str, port: object, *, type: int, flags: int = 0) -> list[tuple[Any, ...]]:
        if flags & socket.AI_NUMERICHOST and not host[0].isdigit():
            raise socket.gaierror("no number")
        hosts = [host] if host[0].isdigit() else known
        return [(socket.AF_INET, type, 6, "", (address, 0)) for address in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    def now(*addresses: str) -> None:
        known[:] = addresses

    return now


async def router(host: str, port: int = 0) -> tuple[grpc.aio.Server, Members, str]:
    members = Members()
    add = partial(fleet_pb2_grpc.add_FleetServiceServicer_to_server, FleetService(members, FAST))
    server, address = await start_server(add, port, host=host)
    return server, members, address


def test_a_worker_registers_with_every_router_of_a_name_and_lets_those_go_that_left(resolve: Callable[..., None]) -> None:
    async def body() -> None:
        resolve("127.0.0.1")
        first, _, one = await router("127.0.0.1")
        port = int(one.rpartition(":")[2])
        second, there, other = await router("127.0.0.2", port)
        name, heard = f"localhost:{port}", dict[str, tuple[str, ...]]()
        client = FleetClient(MEMBER, (name,), state=lambda: Report(Load()), on_prefill=heard.__setitem__)
        await until(lambda: client.registered() == {name: True})
        assert there.registered == 0
        resolve("127.0.0.2", "127.0.0.1")  # a second one comes
        await until(lambda: client.registered() == {one: True, other: True})
        assert heard == {name: (), one: ("p:1",), other: ("p:1",)}
        resolve("127.0.0.2")  # the first one is to go, and may take its time
        beats = there.beats
        await until(lambda: there.beats > beats + 12)
        assert client.registered() == {one: True, other: True}
        await first.stop(0)
        await until(lambda: client.registered() == {other: True})
        assert heard[one] == ()
        await client.close()
        await second.stop(0)

    run_quiet(body())


def test_a_name_whose_addresses_all_are_silent_is_told_of_by_each_of_them_and_no_third_time(
    resolve: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jdisagg.api.fleet.client.UNHEARD_S", 1.0)
    told: Callable[[], list[str]] = lambda: [m.split(" ")[1] for m in caplog.messages if "has not answered for" in m]  # noqa: E731

    async def body() -> None:
        resolve("127.0.0.1", "127.0.0.2")
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and does not listen
            port = taken.getsockname()[1]
            client = FleetClient(MEMBER, (f"localhost:{port}",), state=lambda: Report(Load()))
            await until(lambda: len(told()) >= 2)
            await asyncio.sleep(1.0)
            assert sorted(told()) == [f"127.0.0.1:{port}", f"127.0.0.2:{port}"]
            await client.close()

    run_quiet(body())


def test_a_router_that_is_alone_is_never_let_go(resolve: Callable[..., None]) -> None:
    async def body() -> None:
        resolve("127.0.0.1", "127.0.0.2")
        server, members, one = await router("127.0.0.1")
        name, gone = f"localhost:{one.rpartition(':')[2]}", one.replace("127.0.0.1", "127.0.0.2")
        client = FleetClient(MEMBER, (name,), state=lambda: Report(Load()))
        await until(lambda: client.registered() == {one: True, gone: False})
        resolve("127.0.0.2")  # where nobody answers
        await server.stop(0)
        await until(lambda: not client.registered()[one])
        server, members, _ = await router("127.0.0.1", int(one.rpartition(":")[2]))
        await until(lambda: client.registered() == {one: True, gone: False})
        assert members.registered
        await client.close()
        await server.stop(0)

    run_quiet(body())
