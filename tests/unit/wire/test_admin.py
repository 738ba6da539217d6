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

from jdisagg.api import channels
from jdisagg.api.admin import AdminService
from jdisagg.core.errors import Unavailable
from jdisagg.v1 import admin_pb2, admin_pb2_grpc
from tests.unit.wire.rig import run_quiet, start_server, until


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
