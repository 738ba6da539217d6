"""With an API key set, every gRPC service but health asks for it; a fleet that shares one works as before."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jdisagg.api import channels
from jdisagg.api.admin import AdminService
from jdisagg.api.channels import INSECURE, Credentials
from jdisagg.api.fleet.client import FleetClient
from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.service import GenerationServicer
from jdisagg.api.generation.token_engine import Health
from jdisagg.api.grpc_health import HealthReporter
from jdisagg.api.peer.byte_source import GrpcByteSource
from jdisagg.api.peer.client import GrpcPeerClient
from jdisagg.api.peer.piece_server import add_peer_service
from jdisagg.api.peer.server import PeerServer
from jdisagg.api.worker.service import WorkerService
from jdisagg.core.fleet import Load, Report
from jdisagg.core.metrics import Metrics
from jdisagg.handoff.messages import Accepted, Agreed, HandoffId, Open, StreamEnded
from jdisagg.router.entry import Entry
from jdisagg.router.fleet_engine import FleetEngine
from jdisagg.router.service import FleetService
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    peer_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.unit.api_edge.fakes import FakeEngine
from tests.unit.reading import read_whole
from tests.unit.router.fakes import ArithmeticEngine, expected
from tests.unit.wire.rig import FAST, WAIT_LIMIT_S, identity, member, request, run_quiet, until

KEY = "k3y-of-the-fleet"
CALM = replace(FAST, dead_after_s=WAIT_LIMIT_S)  # nobody is given up because the machine stands still
MOST_TRIES = 10  # of a call that streams up: gRPC says INTERNAL where its message meets a stream that has ended
FILES = (generation_pb2, worker_pb2, peer_pb2, fleet_pb2, admin_pb2)
METHODS = [
    (service.full_name, method.name, method.client_streaming, method.server_streaming)
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
REFLECTION = ("grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo", True, True)
WRONG: dict[str, tuple[tuple[str, str], ...]] = {
    "none": (),
    "another": (("authorization", "Bearer somebody-elses"),),
    "a part": (("authorization", f"Bearer {KEY[:-1]}"),),
    "more": (("authorization", f"Bearer {KEY}x"),),
    "without its scheme": (("authorization", KEY),),
    "elsewhere": (("x-api-key", KEY),),
    "twice": (("authorization", f"Bearer {KEY}"), ("authorization", "Bearer x")),
}


class Everything:
    """All services of all roles on one port."""

    def __init__(self, tokenizer: Tokenizer | None, credentials: Credentials) -> None:
        self.arithmetic = ArithmeticEngine()
        self.posted: list[Any] = []
        self.drains = 0
        self.credentials = credentials
        self.fleet = FleetEngine(config=CALM, metrics=Metrics(engine=False), credentials=credentials)
        self.pieces = {"k": b"bytes"}
        self.server = server = channels.make_server(credentials)
        if tokenizer is not None:
            edge = Edge(FakeEngine(tokenizer, "hello"), tokenizer, default_deadline_s=10.0)
            generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(edge), server)
        peers = PeerServer(identity(), post=self.posted.append, pieces=self.pieces, config=CALM)
        add_peer_service(peers, server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(self.arithmetic, CALM), server)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(FleetService(self.fleet.workers, CALM), server)
        admin = AdminService(drain=self._drain, stats=self._stats, reset_prefix_cache=self._reset)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        self.health = HealthReporter(server, (), Health)
        self.address = channels.bind(server)

    async def _drain(self, deadline_s: float) -> int:
        self.drains += 1
        return 0

    async def _stats(self) -> dict[str, Any]:
        return {}

    async def _reset(self) -> int:
        return 0

    async def __aenter__(self) -> Everything:
        await self.server.start()
        await self.health.start()
        self.ticking = asyncio.create_task(self.arithmetic.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.ticking.cancel()
        await asyncio.gather(self.ticking, return_exceptions=True)
        await self.health.close()
        await self.fleet.close()
        await self.server.stop(0)


async def code_of(channel: grpc.aio.Channel, method: tuple[str, str, bool, bool], metadata: Any) -> grpc.StatusCode:
    """What an empty message is answered with; OK for a stream that has begun to answer."""
    tries = [await once(channel, method, metadata)]
    while method[2] and tries[-1] is grpc.StatusCode.INTERNAL and len(tries) < MOST_TRIES:
        tries.append(await once(channel, method, metadata))
    return tries[-1]


async def once(channel: grpc.aio.Channel, method: tuple[str, str, bool, bool], metadata: Any) -> grpc.StatusCode:
    service, name, streams_up, streams_down = method
    kind = f"{'stream' if streams_up else 'unary'}_{'stream' if streams_down else 'unary'}"
    options = {"metadata": metadata, "timeout": 30.0} if metadata is not None else {"timeout": 30.0}
    call = getattr(channel, kind)(f"/{service}/{name}")(iter([b""]) if streams_up else b"", **options)
    try:
        if streams_down:
            await call.read()
            if not call.done():
                return grpc.StatusCode.OK
            return await call.code()
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", METHODS, ids=[f"{service}/{name}" for service, name, *_ in METHODS])
def test_every_method_of_every_service_asks_for_the_key(method: tuple[str, str, bool, bool], tokenizer: Tokenizer) -> None:
    async def body() -> None:
        async with Everything(tokenizer, Credentials(api_key=KEY)) as guarded:
            stranger, friend = (
                channels.open_channel(guarded.address),
                channels.open_channel(guarded.address, guarded.credentials),
            )
            codes = {name: await code_of(stranger, method, metadata) for name, metadata in WRONG.items()}
            assert set(codes.values()) == {grpc.StatusCode.UNAUTHENTICATED}, codes
            assert guarded.drains == 0
            assert not guarded.posted
            good = (("authorization", f"Bearer {KEY}"),)
            assert await code_of(stranger, method, good) not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
            assert await code_of(friend, method, None) is not grpc.StatusCode.UNAUTHENTICATED
            await stranger.close()
            await friend.close()

    run_quiet(body())


def test_without_a_key_nobody_is_asked_and_a_key_sent_does_no_harm(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        async with Everything(tokenizer, INSECURE) as server:
            for credentials in (INSECURE, Credentials(api_key=KEY)):
                channel = channels.open_channel(server.address, credentials)
                for method in METHODS:
                    assert await code_of(channel, method, None) is not grpc.StatusCode.UNAUTHENTICATED, method
                await channel.close()

    run_quiet(body())


def test_health_answers_everybody_and_reflection_who_has_the_key(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        async with Everything(None, Credentials(api_key=KEY)) as server:
            channel, keyed = channels.open_channel(server.address), channels.open_channel(server.address, server.credentials)
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert await code_of(channel, REFLECTION, None) is grpc.StatusCode.UNAUTHENTICATED
            assert await code_of(keyed, REFLECTION, None) is grpc.StatusCode.OK
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/jdisagg.v1.AdminService/NoSuchMethod")(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            await channel.close()
            await keyed.close()

    run_quiet(body())


@pytest.mark.parametrize(
    ("key", "theirs", "is_shared"),
    [
        *[(KEY, KEY, True), (None, KEY, False), ("wrong", KEY, False)],
        *[(KEY, f"n3w\n{KEY}", True), (f"{KEY}\nn3w", f"n3w\n{KEY}", True), (f"wrong\n{KEY}", KEY, False)],
    ],
)
def test_a_fleet_that_shares_the_key_works_and_a_stranger_to_it_is_told_why(
    key: str | None, theirs: str, is_shared: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registration, the Run stream, a hand-off and a fetch, by the clients that the processes use."""
    caplog.set_level("INFO")
    monkeypatch.setattr("jdisagg.api.fleet.client.UNHEARD_S", 0.0)

    async def body() -> None:
        async with Everything(None, Credentials(api_key=theirs)) as there:
            mine = Credentials(api_key=key)
            described = member(address=there.address)
            registration = FleetClient(described, (there.address,), state=lambda: Report(Load()), credentials=mine)
            events: list[Any] = []
            peers = GrpcPeerClient(
                identity(epoch="d"), loop=asyncio.get_running_loop(), post=events.append, config=CALM, credentials=mine
            )
            peers.open(there.address, HandoffId("r", 1), Open(request=request("r"), held_tokens=0, backend="grpc"))
            source = GrpcByteSource(mine)
            if is_shared:
                await until(lambda: there.fleet.workers.fleet.entries() and there.fleet.workers.fleet.entries()[0].linked)
                asked = request("routed")
                outputs = [output async for output in there.fleet.generate(asked)]
                assert [token for output in outputs for token in output.token_ids] == expected(asked)
                await until(lambda: there.posted)
                there.posted[0].reply.send(Accepted(cached_tokens=0))
                await until(lambda: len(events) == 2)
                assert [event.message for event in events] == [Agreed(backends=("grpc",)), Accepted(cached_tokens=0)]
                assert await asyncio.to_thread(read_whole, source, there.address, "k", 1e9) == b"bytes"
            else:
                await until(lambda: any("refuses this worker" in record.message for record in caplog.records))
                await until(lambda: events)
                refused = [
                    record.message for record in caplog.records if "was refused: missing or wrong API key" in record.message
                ]
                assert len(refused) == 1, "the first; those within ten seconds are counted"
                assert refused[0].startswith(("/jdisagg.v1.FleetService/", "/jdisagg.v1.PeerService/"))
                assert isinstance(events[0].message, StreamEnded)
                assert "missing or wrong API key" in str(events[0].message.error)
                with pytest.raises(ConnectionError, match="UNAUTHENTICATED: missing or wrong API key"):
                    await asyncio.to_thread(read_whole, source, there.address, "k", 1e9)
                await asyncio.sleep(0.6)  # it goes on asking, and says so once
                assert sum("refuses this worker" in record.message for record in caplog.records) == 1
                assert "has not answered" not in caplog.text, "it has, and said no"
                assert not there.posted
                assert not there.fleet.workers.members()
            source.close()
            await peers.aclose()
            await registration.close()

    run_quiet(body())
    assert KEY not in caplog.text


def test_a_worker_whose_router_changes_its_key_says_so_each_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fleet, entry = SimpleNamespace(prefill_for=lambda entry: None), Entry(member(), 0.0)
    workers: Any = SimpleNamespace(register=lambda member: None, heartbeat=lambda *told: entry, fleet=fleet)

    def told(what: str) -> int:
        return sum(what in record.message for record in caplog.records)

    async def body() -> None:
        port, registration = 0, None
        for turn, key in enumerate((KEY, None, KEY, None)):
            server = channels.make_server(Credentials(api_key=key))
            fleet_pb2_grpc.add_FleetServiceServicer_to_server(FleetService(workers, CALM), server)
            address = channels.bind(server, port=port)
            port = int(address.rpartition(":")[2])
            await server.start()
            registration = registration or FleetClient(member(address="127.0.0.1:9"), (address,), state=lambda: Report(Load()))
            refusals, registrations = (turn + 2) // 2, (turn + 1) // 2
            await until(lambda: (told("refuses this worker"), told("registered with")) == (refusals, registrations))  # noqa: B023
            await server.stop(0)
        assert registration is not None
        await registration.close()

    run_quiet(body())


def test_a_worker_that_wants_another_key_is_reported_once_by_the_router(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with Everything(None, Credentials(api_key=KEY)) as worker, Everything(None, INSECURE) as router:
            registration = FleetClient(member(address=worker.address), (router.address,), state=lambda: Report(Load()))
            await until(lambda: any("refuses this router" in record.message for record in caplog.records))
            await asyncio.sleep(1.2)  # two more attempts
            assert sum("refuses this router" in record.message for record in caplog.records) == 1
            await registration.close()

    run_quiet(body())


def test_credentials_do_not_show_the_key() -> None:
    assert KEY not in repr(Credentials(api_key=KEY))
