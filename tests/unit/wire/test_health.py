"""grpc.health.v1 and reflection, over real sockets."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jdisagg.api import channels, grpc_health
from jdisagg.api.generation.token_engine import Health
from jdisagg.api.grpc_health import HealthReporter
from tests.unit.wire.raw_http2 import HEADERS, RawCall
from tests.unit.wire.rig import pause, run_quiet

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_watcher_that_takes_nothing_keeps_nobody_from_the_truth_and_no_drain_from_going_on() -> None:
    async def body() -> None:
        status = Health()
        server = channels.make_server()
        reporter = HealthReporter(server, (), lambda: status)
        address = channels.bind(server)
        await server.start()
        await reporter.start()
        deaf = await RawCall.begin(address, "/grpc.health.v1.Health/Watch", b"", window=0)
        try:
            async with channels.open_channel(address) as channel, asyncio.timeout(20):
                stub = health_pb2_grpc.HealthStub(channel)
                watch = stub.Watch(health_pb2.HealthCheckRequest())
                assert (await watch.read()).status == SERVING
                await deaf.until(HEADERS)  # which pass where messages may not
                status = Health(reason="draining")
                assert (await watch.read()).status == NOT_SERVING
                assert (await stub.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
                status = Health()
                assert (await watch.read()).status == SERVING
                await reporter.close()
                assert (await watch.read()).status == NOT_SERVING
                await reporter.start()  # too late
                assert (await stub.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        finally:
            deaf.close()
            await server.stop(0)

    run_quiet(body())


def test_a_service_that_is_not_served_is_unknown() -> None:
    async def body() -> None:
        server = channels.make_server()
        reporter = HealthReporter(server, ("jdisagg.v1.WorkerService",), Health)
        address = channels.bind(server)
        await server.start()
        await reporter.start()
        async with channels.open_channel(address) as channel, asyncio.timeout(20):
            stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service="another")
            listed = (await stub.List(health_pb2.HealthListRequest())).statuses
            assert {name: one.status for name, one in listed.items()} == {"": SERVING, "jdisagg.v1.WorkerService": SERVING}
            with pytest.raises(grpc.aio.AioRpcError, match="no such service here") as caught:
                await stub.Check(request)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            watch = stub.Watch(request)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            watch.cancel()
            request.service *= 1000
            for ask in (stub.Check(request), stub.Watch(request).read()):
                with pytest.raises(grpc.aio.AioRpcError, match="no such service here"):
                    await ask
        await reporter.close()
        await server.stop(0)

    run_quiet(body())


def test_health_that_cannot_be_told_is_not_serving_until_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grpc_health, "AFTER_BUG_S", 0.3)

    async def body() -> None:
        fails = [False]

        def status() -> Health:
            if fails[0]:
                raise KeyError("our bug")
            return Health()

        server = channels.make_server()
        reporter = HealthReporter(server, (), status)
        address = channels.bind(server)
        await server.start()
        await reporter.start()
        channel = channels.open_channel(address)
        check = health_pb2_grpc.HealthStub(channel).Check
        for fails[0], wanted in (
            (False, health_pb2.HealthCheckResponse.SERVING),
            (True, health_pb2.HealthCheckResponse.NOT_SERVING),
            (False, health_pb2.HealthCheckResponse.SERVING),
        ):
            while (await check(health_pb2.HealthCheckRequest())).status != wanted:
                await asyncio.sleep(0.01)
        assert "our bug" in caplog.text
        await reporter.close()
        await channel.close()
        await server.stop(0)

    run_quiet(body())


def test_grpc_health_follows_the_engine_within_a_second_and_reflection_lists_services():
    async def body() -> None:
        status = Health()
        server = channels.make_server()
        reporter = HealthReporter(server, ("jdisagg.v1.WorkerService",), lambda: status)
        address = channels.bind(server)
        await server.start()
        await reporter.start()
        channel = channels.open_channel(address)
        stub = health_pb2_grpc.HealthStub(channel)

        async def serving(name: str = "jdisagg.v1.WorkerService") -> bool:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            return answer.status == health_pb2.HealthCheckResponse.SERVING

        async def turns(to: bool) -> float:
            asked_s = 0.0
            while await serving() is not to:
                asked_s += await pause(0.02)
            return asked_s

        assert await serving()
        assert await serving("")
        status = Health(reason="draining")
        assert await turns(False) < 1.0
        status = Health()
        assert await turns(True) < 1.0
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        listed = {service.name for service in (await call.read()).list_services_response.service}
        assert "jdisagg.v1.WorkerService" in listed
        assert await call.read() is grpc.aio.EOF
        await reporter.close()
        assert not await serving()
        await channel.close()
        await server.stop(0)

    run_quiet(body())
