"""A listener outside the process knows the prefix cache of a real server: served, evicted, reset, drained."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from jdisagg.api.kv_cache_view import KVCacheView
from jdisagg.v1 import admin_pb2, admin_pb2_grpc, kv_events_pb2, kv_events_pb2_grpc
from tests.e2e.client import OPTIONS, Asked, generate, generate_all
from tests.e2e.conftest import Start
from tests.e2e.processes import STOP_TIMEOUT_S, ServerProcess

GREEDY = {"temperature": 0.0, "ignore_eos": True}
REQUESTS = [
    Asked(prompt=(*range(20, 84), *range(90 + number, 150 + number)), sampling={"max_tokens": 20, **GREEDY})
    for number in range(24)
]
LONG = [Asked(prompt=tuple(range(20 + n, 40 + n)), sampling={"max_tokens": 230, **GREEDY}) for n in range(12)]  # seconds


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 120))


async def until(condition: Callable[[], object], what: str, limit_s: float = 30.0) -> None:
    """As `wait_until`, on an event loop."""
    deadline_s, is_over = time.monotonic() + limit_s, False
    while not condition():
        assert not is_over, f"not within {limit_s} s: {what}"
        await asyncio.sleep(0.02)
        is_over = time.monotonic() > deadline_s


async def cache_of(server: ServerProcess) -> tuple[int, str]:
    """What the server says of its prefix cache: number of pages, digest."""
    cache = (await asyncio.to_thread(server.state))["scheduler"]["prefix_cache"]
    return cache["pages"], cache["digest"]


async def followed(server: ServerProcess, view: KVCacheView) -> tuple[int, str]:
    """Wait until the view agrees with the idle server, and return what both know."""
    deadline_s = time.monotonic() + 30
    while (wanted := await cache_of(server)) != (known := (len(view.pages), view.digest)):
        assert time.monotonic() < deadline_s, f"the server has {wanted}, the listener {known}"
        await asyncio.sleep(0.05)
    return wanted


@pytest.mark.covers("V37", "V46")
def test_a_listener_knows_the_cache_of_a_unified_server_until_it_drains(start: Start, exact_flags: tuple[str, ...]) -> None:
    flags = ("--role", "unified", *exact_flags, "--num-pages", "60", "--enable-kv-events", "--drain-s", "100")
    server = start("events", *flags).wait_ready()

    async def body() -> None:
        view = KVCacheView()
        task = asyncio.create_task(view.follow(server.grpc))
        try:
            assert all(got.error is None for got in await generate_all(server.grpc, REQUESTS))
            num_pages, _ = await followed(server, view)
            assert num_pages > 40
            assert any(page.token_ids == tuple(range(20, 36)) and page.parent is None for page in view.pages.values())
            evicted = await asyncio.to_thread(server.metric, "jdisagg_kv_events_total", kind="removed")
            assert evicted > 0, "the pool is too big for this test"
            assert await asyncio.to_thread(server.metric, "jdisagg_kv_event_listeners") == 1

            await _reset(server)
            await until(lambda: not view.pages, "cleared")
            assert (await cache_of(server))[0] == 0
            assert (await generate_all(server.grpc, REQUESTS[:1]))[0].error is None
            assert (await followed(server, view))[0] == (64 + 60 + 20 - 1) // 16
            assert view.num_snapshots == 1
            await _ends_when_it_drains(server)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    run(body())
    assert server.process.wait(STOP_TIMEOUT_S) == 0
    assert "Traceback" not in server.log_since_ready()


async def _reset(server: ServerProcess) -> None:
    async with grpc.aio.insecure_channel(server.grpc, options=OPTIONS) as channel:
        answer = await admin_pb2_grpc.AdminServiceStub(channel).ResetPrefixCache(
            admin_pb2.ResetPrefixCacheRequest(), timeout=30
        )
        assert answer.pages_freed > 40


async def _ends_when_it_drains(server: ServerProcess) -> None:
    """SIGTERM while requests run: the stream of events ends at once, they go on to their end."""
    async with grpc.aio.insecure_channel(server.grpc, options=OPTIONS) as channel:
        stub = kv_events_pb2_grpc.KVEventsServiceStub(channel)
        call = stub.Subscribe(kv_events_pb2.SubscribeRequest(), timeout=100)
        assert (await call.read()).snapshot
        running = [asyncio.create_task(generate(channel, asked)) for asked in LONG]
        while len((await asyncio.to_thread(server.state))["streams"]) + sum(task.done() for task in running) < len(LONG):
            await asyncio.sleep(0.01)
        server.signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _read_all(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not all(task.done() for task in running), "the events went on for as long as the requests"
        for got in await asyncio.gather(*running):
            assert got.error is None
            assert len(got.tokens[0]) == 230


@pytest.mark.covers("V37")
def test_a_colocated_server_has_two_pools_and_each_is_known(start: Start, exact_flags: tuple[str, ...]) -> None:
    flags = ("--role", "colocated", "--local-prefill", "never", *exact_flags, "--enable-kv-events")
    server = start("colocated", *flags).wait_ready()

    async def body() -> None:
        views = {pool: KVCacheView(pool=pool) for pool in ("prefill", "decode")}
        tasks = [asyncio.create_task(view.follow(server.grpc)) for view in views.values()]
        try:
            assert (await generate_all(server.grpc, REQUESTS[:1]))[0].error is None
            num_pages, _ = await followed(server, views["decode"])
            prompt = REQUESTS[0].prompt
            await until(lambda: _pages_of(prompt) <= _tokens_in(views["prefill"]), "the prompt on P")
            assert num_pages >= (len(prompt) + 20 - 1) // 16
            assert views["prefill"].epoch != views["decode"].epoch
            assert set(views["prefill"].pages) <= set(views["decode"].pages)  # equal prefixes have equal names everywhere
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(body())
    assert server.stop() == 0


async def _read_all(call: grpc.aio.Call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def _tokens_in(view: KVCacheView) -> set[tuple[int, ...]]:
    return {page.token_ids for page in view.pages.values()}


def _pages_of(prompt: Any) -> set[tuple[int, ...]]:
    return {tuple(prompt[begin : begin + 16]) for begin in range(0, len(prompt) - 15, 16)}
