"""What a gRPC port spends on those who only connect, send much, or send nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from jdisagg.api import channels, listening
from jdisagg.api.channels import FULL_MESSAGE_BYTES, MAX_REQUEST_BYTES, Credentials
from jdisagg.api.peer import presence
from jdisagg.api.peer.link import LONGEST_HELLO_S
from jdisagg.transfer import lanes
from jdisagg.v1 import fleet_pb2, fleet_pb2_grpc, generation_pb2_grpc
from tests.unit.wire.rig import run_quiet, start_server, until
from tests.unit.wire.test_api_key import KEY, METHODS, Everything

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"  # the preface and empty SETTINGS
SETTINGS, MAX_CONCURRENT_STREAMS = 4, 3
IDLE, CLIENT_IDLE = "grpc.max_connection_idle_ms", "grpc.client_idle_timeout_ms"


class Lister(fleet_pb2_grpc.FleetServiceServicer):
    """Notes how long what it was asked for is."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    async def Register(self, request: fleet_pb2.RegisterRequest, context: Any) -> fleet_pb2.RegisterResponse:
        self.lengths.append(request.ByteSize())
        return fleet_pb2.RegisterResponse()


@pytest.mark.parametrize(
    "method", [method for method in METHODS if not method[2]], ids=lambda method: f"{method[0]}/{method[1]}"
)
def test_without_the_key_a_call_is_refused_before_its_message_has_come(method: tuple[str, str, bool, bool]) -> None:
    service, name, _, streams_down = method

    async def body() -> None:
        everything = Everything(None, Credentials(api_key=KEY))
        for_clients = generation_pb2_grpc.GenerationServiceServicer()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(for_clients, everything.server)
        async with everything as server:
            channel = channels.open_channel(server.address)
            call = (channel.stream_stream if streams_down else channel.stream_unary)(f"/{service}/{name}")()
            async with asyncio.timeout(10.0):
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            await channel.close()

    run_quiet(body())


def test_a_server_takes_a_full_message_and_one_more_request_and_nothing_longer() -> None:
    lister = Lister()

    async def body() -> None:
        server, address = await start_server(lambda server: fleet_pb2_grpc.add_FleetServiceServicer_to_server(lister, server))
        channel = channels.open_channel(address)
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        longest = FULL_MESSAGE_BYTES + MAX_REQUEST_BYTES
        await stub.Register(fleet_pb2.RegisterRequest(member=fleet_pb2.Member(model="m" * longest)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Register(fleet_pb2.RegisterRequest(member=fleet_pb2.Member(model="m" * (longest + 2**20))))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [length > longest for length in lister.lengths] == [True]
        await channel.close()
        await server.stop(0)

    run_quiet(body())


def test_connections_beyond_a_share_of_the_descriptors_are_hung_up_on_and_others_live_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 6
    monkeypatch.setattr(listening.resource, "getrlimit", lambda _: (most / listening.SHARE, 4096))
    lister = Lister()

    async def body() -> None:
        server, address = await start_server(lambda server: fleet_pb2_grpc.add_FleetServiceServicer_to_server(lister, server))
        host, _, port = address.rpartition(":")
        channel = channels.open_channel(address)
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        await stub.Register(fleet_pb2.RegisterRequest())
        for _ in range(3):  # each time those that have left are taken again
            strangers = [await asyncio.open_connection(host, int(port)) for _ in range(3 * most)]
            readings = [asyncio.ensure_future(reader.read()) for reader, _ in strangers]
            await until(lambda readings=readings: sum(reading.done() for reading in readings) == 2 * most + 1)
            await stub.Register(fleet_pb2.RegisterRequest())
            for _, writer in strangers:
                writer.close()
            await asyncio.gather(*readings, return_exceptions=True)
            await until(lambda: num_connections_at(address) == 1)
        assert len(lister.lengths) == 4
        await channel.close()
        await server.stop(0)

    run_quiet(body())


def test_a_connection_without_calls_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = dict(channels._SERVER_OPTIONS)
    assert usual[IDLE] <= 60_000
    monkeypatch.setattr(channels, "_SERVER_OPTIONS", tuple((usual | {IDLE: 1000}).items()))

    async def body() -> None:
        server, address = await start_server(lambda server: None)
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(HELLO)
        async with asyncio.timeout(20.0):
            heard = await reader.read()  # to its end
        assert settings_of(heard)[MAX_CONCURRENT_STREAMS] == channels.MAX_STREAMS
        writer.close()
        await server.stop(0)

    run_quiet(body())


def test_no_connection_of_ours_to_a_peer_rests_until_it_is_closed() -> None:
    """gRPC writes "Got goaway" of a connection that a server ends, and a call may meet that end."""
    ours_ms = dict(channels._CHANNEL_OPTIONS)[CLIENT_IDLE]
    assert 2 * ours_ms <= dict(channels._SERVER_OPTIONS)[IDLE]
    asked_after_s = presence.AGAIN_S * (1.0 + presence._SPREAD / 2) + presence.LOOK_S + presence.PROBE_INTERVAL_S
    assert 1000 * max(asked_after_s + LONGEST_HELLO_S, lanes.IDLE_S) < ours_ms


def num_connections_at(address: str) -> int:
    """Established ones, by the server's end."""
    mine = f":{int(address.rpartition(':')[2]):04X}"
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return sum(local.endswith(mine) and state == "01" for _, local, _, state, *_ in lines)


def settings_of(heard: bytes) -> dict[int, int]:
    """Of the first frame."""
    length, kind = int.from_bytes(heard[:3]), heard[3]
    assert kind == SETTINGS
    body = heard[9 : 9 + length]
    return {int.from_bytes(body[at : at + 2]): int.from_bytes(body[at + 2 : at + 6]) for at in range(0, length, 6)}
