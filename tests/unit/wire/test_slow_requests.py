"""Calls whose request takes long to come: a few of them, and the oldest goes. Those of a moment are no such calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio
import pytest

from jdisagg.api import late_request
from jdisagg.api.channels import MAX_RECEIVED_BYTES, bind, make_server, open_channel
from jdisagg.api.generation.token_engine import Health
from jdisagg.api.grpc_health import HealthReporter
from jdisagg.api.http.body import ROOM_BYTES
from jdisagg.api.late_request import MOST_SLOW, SlowRequests
from jdisagg.api.status_details import read_retry_after_s
from jdisagg.v1 import generation_pb2, generation_pb2_grpc
from tests.unit.api_edge.fakes import run

GENERATE = "/jdisagg.v1.GenerationService/Generate"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REQUEST = generation_pb2.GenerateRequest(text="x" * 1000)


class Servicer(generation_pb2_grpc.GenerationServiceServicer):
    """Answers each call with its text."""

    async def Generate(self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        await context.write(generation_pb2.GenerateResponse(request_id=request.text))


@asynccontextmanager
async def serving() -> AsyncIterator[grpc.aio.Channel]:
    server = make_server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Servicer(), server)
    HealthReporter(server, (), Health)
    address = bind(server)
    await server.start()
    channel = open_channel(address)
    try:
        yield channel
    finally:
        await channel.close()
        await server.stop(0.0)


def begin(channel: grpc.aio.Channel, method: str = GENERATE) -> Any:
    """A call that has brought no request yet."""
    kind = channel.stream_unary if method == CHECK else channel.stream_stream
    return kind(method)(timeout=60.0)


def test_who_needs_no_key_ends_nobody_elses_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_request, "SLOW_S", 0.2)
    monkeypatch.setattr(late_request, "LATE_S", 10.0)
    monkeypatch.setattr(late_request, "MOST_SLOW", 3)

    async def check() -> None:
        async with serving() as channel:
            generate = begin(channel)
            await asyncio.sleep(0.05)
            checks = [begin(channel, CHECK) for _ in range(5)]
            for call in checks[:2]:
                assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await asyncio.sleep(0.3)
            assert not generate.done()
            for call in (generate, *checks):
                call.cancel()

    run(check())


def test_of_too_many_calls_whose_requests_take_long_the_oldest_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_request, "SLOW_S", 0.3)
    monkeypatch.setattr(late_request, "LATE_S", 10.0)
    monkeypatch.setattr(late_request, "MOST_SLOW", 3)

    async def check() -> None:
        async with serving() as channel:
            calls = []
            for _ in range(5):
                calls.append(begin(channel))
                await asyncio.sleep(0.05)
            for call in calls[:2]:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "more than 3 requests take longer than 0.3 s to come" in (caught.value.details() or "")
                assert read_retry_after_s(caught.value) == 5.0
            await asyncio.sleep(0.5)
            for call in calls[2:]:
                assert not call.done()
                await call.write(REQUEST.SerializeToString())
                await call.done_writing()
                assert generation_pb2.GenerateResponse.FromString(await call.read()).request_id == REQUEST.text
                assert await call.code() is grpc.StatusCode.OK
            late = [begin(channel) for _ in range(3)]  # places of those that ended are free
            await asyncio.sleep(0.6)
            assert not any(call.done() for call in late)
            for call in late:
                call.cancel()

    run(check())


def test_many_calls_at_once_whose_requests_come_are_all_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_request, "MOST_SLOW", 0)

    async def check() -> None:
        async with serving() as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)

            async def ask() -> int:
                return len([answer async for answer in stub.Generate(REQUEST, timeout=60.0)])

            assert await asyncio.gather(*(ask() for _ in range(400))) == [1] * 400

    run(check())


def test_what_a_loop_that_was_held_up_has_not_heard_of_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_request, "SLOW_S", 0.3)
    monkeypatch.setattr(late_request, "LATE_S", 0.2)
    monkeypatch.setattr(late_request, "MOST_SLOW", 0)

    async def check() -> None:
        slow, began_s, was_kept = SlowRequests(), time.monotonic(), False
        with suppress(TimeoutError):
            async with asyncio.timeout(60.0) as limit:
                with slow.watch(limit):
                    time.sleep(0.7)
                    await asyncio.sleep(0.1)
                    was_kept = True
                    await asyncio.sleep(50.0)
        assert was_kept
        assert limit.expired()
        assert time.monotonic() - began_s < 40.0

    run(check())


@pytest.mark.parametrize("takes_s", [0.0, 0.3])
def test_of_a_call_whose_request_has_come_nothing_is_kept(takes_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_request, "SLOW_S", 0.1 if takes_s else 10.0)
    monkeypatch.setattr(late_request, "LATE_S", 20.0)

    async def check() -> None:
        slow = SlowRequests()
        async with asyncio.timeout(60.0) as limit:
            with slow.watch(limit):
                await asyncio.sleep(takes_s)
                assert len(slow._slow) == (takes_s > 0)
            await asyncio.sleep(0.2)
            assert not slow._slow
            assert not slow._timers

    run(check())


@pytest.mark.parametrize("method", [CHECK, WATCH])
def test_a_call_of_health_that_brings_no_request_ends(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_request, "REQUEST_TIMEOUT_S", 0.3)

    async def check() -> None:
        async with serving() as channel:
            call = begin(channel, method)
            began_s = time.monotonic()
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "no request came within 0.3 s" in await call.details()
            assert time.monotonic() - began_s < 15.0

    run(check())


def test_what_may_be_on_its_way_is_no_more_than_over_http() -> None:
    assert MOST_SLOW * MAX_RECEIVED_BYTES <= ROOM_BYTES < (MOST_SLOW + 1) * MAX_RECEIVED_BYTES
