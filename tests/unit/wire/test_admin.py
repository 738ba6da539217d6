"""What operators and probes ask of a process: admin calls, health and reflection, over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jdisagg.api import channels, grpc_health
from jdisagg.api.admin import AdminService
from jdisagg.api.generation.token_engine import Health
from jdisagg.api.grpc_health import HealthReporter
from jdisagg.core.errors import Unavailable
from jdisagg.v1 import admin_pb2, admin_pb2_grpc
from tests.unit.wire.rig import pause, run_quiet, start_server, until


async def _no_stats() -> dict[str, object]:
    return {}


@asynccontextmanager
async def served(
    drain: Callable[[float], Awaitable[int]],
    stats: Callable[[], Awaitable[dict[str, object]]] = _no_stats,
    reset: Callable[[], Awaitable[int]] | None = None,
) -> AsyncIterator[admin_pb2_grpc.AdminServiceStub]:
    """AdminService over a socket; without `reset` it is that of a process without a prefix cache."""
    service = AdminService(drain=drain, stats=stats, reset_prefix_cache=reset)
    server, address = await start_server(lambda s: admin_pb2_grpc.add_AdminServiceServicer_to_server(service, s))
    async with channels.open_channel(address) as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)
    await server.stop(0)


def test_admin_calls_what_it_was_given():
    async def body() -> None:
        drained: list[float] = []

        async def drain(deadline_s: float) -> int:
            drained.append(deadline_s)
            return 3

        async def reset() -> int:
            if drained:
                raise Unavailable("pages are being transferred; try again")
            return 17

        async def stats() -> dict[str, object]:
            return {"queues": {"waiting": 2}}

        async with served(drain, stats, reset) as stub:
            assert (await stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())).pages_freed == 17
            assert (await stub.Drain(admin_pb2.DrainRequest(deadline_ms=50))).unfinished == 3
            assert json.loads((await stub.Stats(admin_pb2.StatsRequest())).json) == {"queues": {"waiting": 2}}
            with pytest.raises(grpc.aio.AioRpcError, match="being transferred") as caught:
                await stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    run_quiet(body())


@pytest.mark.parametrize("fails", [False, True])
def test_a_drain_goes_through_when_its_client_hangs_up(fails: bool, caplog: pytest.LogCaptureFixture):
    async def body() -> None:
        announcing, announced, admits = asyncio.Event(), asyncio.Event(), [True]

        async def drain(deadline_s: float) -> int:
            announcing.set()
            await announced.wait()
            admits[0] = False
            if fails:
                raise KeyError("our bug")
            return 0

        async with served(drain) as stub:
            call = stub.Drain(admin_pb2.DrainRequest(deadline_ms=5000))
            await announcing.wait()
            call.cancel()
            await asyncio.sleep(0.2)
            announced.set()
            await until(lambda: not admits[0] and ("our bug" in caplog.text or not fails))
            await asyncio.sleep(0.05)
            assert ("our bug" in caplog.text) == fails

    run_quiet(body())


@pytest.mark.parametrize(
    ("unfinished", "level", "said"),
    [(0, "INFO", "drained: every request has ended"), (3, "WARNING", "requests still running at the drain's deadline: 3")],
)
def test_the_log_says_who_asked_for_a_drain_and_how_it_ended(
    unfinished: int, level: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async def drain(deadline_s: float) -> int:
            assert len(told()) == 1, "who asked is said before"
            return unfinished

        def told() -> list[tuple[str, str]]:
            return [(one.levelname, one.getMessage()) for one in caplog.records if one.name == "jdisagg.api.admin"]

        async with served(drain) as stub:
            await stub.Drain(admin_pb2.DrainRequest(deadline_ms=5000))
            asked, ended = told()
            assert re.fullmatch(r"ipv4:127\.0\.0\.1:\d+ asks this process to drain within 5 s", asked[1])
            assert asked[0] == "INFO"
            assert ended == (level, said)

    caplog.set_level("INFO")
    run_quiet(body())


def test_resetting_a_prefix_cache_that_is_not_there_invites_no_retry():
    async def body() -> None:
        async def drain(deadline_s: float) -> int:
            return 0

        async with served(drain) as stub:
            with pytest.raises(grpc.aio.AioRpcError, match="a router has no prefix cache; ask the workers") as caught:
                await stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

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
            return Health(healthy=True, ready=True)

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
        status = Health(healthy=True, ready=True)
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
        status = Health(healthy=True, ready=False, reason="draining")
        assert await turns(False) < 1.0
        status = Health(healthy=True, ready=True)
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
