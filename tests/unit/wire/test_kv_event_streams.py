"""Streams of KV events: none is opened that cannot be served, outlives its worker, or is kept for who does not read."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from jdisagg.api import unread
from jdisagg.api.kv_cache_view import KVCacheView
from tests.unit.reading import read_on
from tests.unit.wire.kv_events_worker import HUGE_PAGE, Response, Worker, refusal, subscribed
from tests.unit.wire.rig import run_quiet, until


def test_a_big_set_comes_in_parts_that_every_client_accepts():
    async def body() -> None:
        worker = await Worker(page_size=HUGE_PAGE).start()
        await worker.store_huge_pages(9)
        await until(lambda: worker.ring.snapshot().sequence == 9)
        view = KVCacheView()
        async with subscribed(worker) as call:
            parts: list[Response] = []
            while not parts or parts[-1].more:
                parts.append(await call.read())
                view.apply(parts[-1])
                assert len(view.pages) == (0 if parts[-1].more else 9)  # all or nothing
        assert [len(part.events) for part in parts] == [2, 2, 2, 2, 1]
        assert max(part.ByteSize() for part in parts) < 2**20
        await worker.stop()

    run_quiet(body())


@pytest.mark.covers("V46")
def test_streams_end_within_a_second_when_the_worker_drains_and_none_is_opened_after():
    async def body() -> None:
        worker = await Worker(num_batches=8, page_size=HUGE_PAGE).start()
        async with subscribed(worker) as idle, subscribed(worker) as stuck:
            await idle.read()
            await stuck.read()
            reading = asyncio.create_task(read_on(idle))
            await worker.store_huge_pages(200)
            assert worker.listeners == 2
            closing = asyncio.create_task(worker.service.close())
            took_s = await until(lambda: closing.done() and worker.listeners == 0)
            assert took_s < 1.0, "also the one whose client does not read"
            with pytest.raises(grpc.aio.AioRpcError, match="draining") as caught:
                await reading
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert (await refusal(worker))[0] is grpc.StatusCode.UNAVAILABLE
            stopping = asyncio.create_task(worker.server.stop(1.0))
            assert await until(stopping.done) < 2.0
            with pytest.raises(grpc.aio.AioRpcError):
                await read_on(stuck)

    run_quiet(body())  # and leaves no task


def test_a_server_that_stops_without_draining_ends_them_too():
    async def body() -> None:
        worker = await Worker().start()
        async with subscribed(worker) as call:
            await call.read()
            stopping = asyncio.create_task(worker.server.stop(0.5))
            assert await until(stopping.done) < 1.0
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            assert await until(lambda: worker.listeners == 0) < 1.0

    run_quiet(body())


def test_what_cannot_be_served_is_refused_with_what_to_change():
    async def body() -> None:
        worker = await Worker().start()
        code, text = await refusal(worker, pool="decode")
        assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, "pool: got 'decode', wanted unified")
        worker.service._rings["prefill"] = worker.ring
        code, text = await refusal(worker)
        assert (code, text) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "pool: got none, wanted unified or prefill: this process has 2",
        )
        worker.service._rings.clear()
        code, text = await refusal(worker)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "--enable-kv-events" in text
        with pytest.raises(grpc.aio.AioRpcError, match="enable-kv-events"):
            await KVCacheView().follow(worker.address)
        await worker.stop()

    run_quiet(body())


def test_a_listener_that_reads_nothing_any_more_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "UNREAD_TIMEOUT_S", 0.3)

    async def body() -> None:
        worker = await Worker(page_size=HUGE_PAGE).start()
        async with subscribed(worker) as call:
            await call.read()
            assert worker.listeners == 1
            await worker.store_huge_pages(200)  # more than sockets hold
            await until(lambda: worker.listeners == 0)

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_on(call)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert caught.value.details() == "KV events: nothing of them was taken for 0.3 s; read sooner"
        await worker.stop()

    run_quiet(body())
