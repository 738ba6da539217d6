"""KVEventsService over real sockets: listeners that come, lag, go and come back know what the prefix index holds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from time import monotonic

import grpc
import grpc.aio
import pytest

from jdisagg.api import unread
from jdisagg.api.kv_cache_view import KVCacheView, SequenceGap
from jdisagg.api.kv_events.ring import KVEventRing
from jdisagg.api.kv_events.service import KVEventsService
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.kv.events import Batch, Cleared, Removed, Stored
from jdisagg.kv.prefix import PrefixIndex
from jdisagg.roles.kv_feed import KVEventFeed
from jdisagg.v1 import kv_events_pb2, kv_events_pb2_grpc
from tests.unit.reading import read_on
from tests.unit.sched.engine_fake import FakeEngine, request
from tests.unit.wire.rig import narrow_channel, run_quiet, start_server, until

PAGE_SIZE = 4
HUGE_PAGE = 32768  # tokens: a batch of 100 KB and more
Response = kv_events_pb2.SubscribeResponse


class Worker:
    """The real scheduler on a fake device, its feed, and the service."""

    def __init__(self, *, epoch: str = "epoch-1", num_batches: int = 4096, page_size: int = PAGE_SIZE) -> None:
        self.metrics = Metrics()
        self.ring = KVEventRing(
            pool="unified", epoch=epoch, page_size=page_size, num_batches=num_batches, loop=asyncio.get_running_loop()
        )
        self.engine = FakeEngine(Role.UNIFIED, num_pages=40)
        self.feed = KVEventFeed(self.engine.scheduler.kv_journal(), self.ring.post, self.metrics)
        self.service = KVEventsService({"unified": self.ring}, self.metrics)
        self.random = random.Random(1)
        self.num_requests = 0
        self.num_synthetic = 0

    async def start(self, port: int = 0) -> Worker:
        self.server, self.address = await start_server(
            lambda s: kv_events_pb2_grpc.add_KVEventsServiceServicer_to_server(self.service, s), port
        )
        return self

    async def stop(self) -> None:
        await self.service.close()
        await self.server.stop(1.0)

    def serve(self, count: int = 1) -> None:
        """Run requests to their end, a batch after every tick."""
        for _ in range(count):
            prompt = tuple(self.random.choices(range(1, 30), k=self.random.randint(5, 40)))
            self.num_requests += 1
            self.engine.add(request(f"r{self.num_requests}", prompt, 6))
            for _ in range(20):
                self.engine.tick()
                self.feed.publish()
        assert self.engine.scheduler.is_idle()

    def reset(self) -> None:
        self.engine.scheduler.reset_prefix_cache()
        self.feed.publish()

    async def store_huge_pages(self, count: int) -> float:
        """Batches by hand, a big page each; returns the longest time but one that one took to hand over: the machine may stand
        still once."""
        took_s = [0.0]
        for _ in range(count):
            self.num_synthetic += 1
            key = self.num_synthetic.to_bytes(16)
            began_s = monotonic()
            self.ring.post(Batch(self.num_synthetic, 0.0, (Stored((key,), None, (30_000,) * HUGE_PAGE, b"root"),)))
            took_s.append(monotonic() - began_s)
            await asyncio.sleep(0.001)
        return sorted(took_s)[-2]

    @property
    def listeners(self) -> float:
        return self.metrics.cache.event_listeners._value.get()

    def is_known_to(self, view: KVCacheView) -> bool:
        cache = self.engine.scheduler.snapshot()["prefix_cache"]
        return (view.epoch, len(view.pages), view.digest) == (self.ring.epoch, cache["pages"], cache["digest"])


@asynccontextmanager
async def following(worker: Worker, view: KVCacheView) -> AsyncIterator[KVCacheView]:
    task = asyncio.create_task(view.follow(worker.address))
    try:
        yield view
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def subscribed(worker: Worker, epoch: str = "", from_sequence: int = 0, pool: str = "") -> AsyncIterator[grpc.aio.Call]:
    channel = narrow_channel(worker.address)
    asked = kv_events_pb2.SubscribeRequest(epoch=epoch, from_sequence=from_sequence, pool=pool)
    try:
        yield kv_events_pb2_grpc.KVEventsServiceStub(channel).Subscribe(asked, timeout=60)
    finally:
        await channel.close()


async def refusal(worker: Worker, pool: str = "") -> tuple[grpc.StatusCode, str]:
    async with subscribed(worker, pool=pool) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    return caught.value.code(), caught.value.details() or ""


@pytest.mark.covers("V37")
def test_a_new_listener_gets_a_snapshot_and_then_every_batch():
    async def body() -> None:
        worker = await Worker().start()
        worker.serve(3)
        async with following(worker, KVCacheView()) as view:
            await until(lambda: worker.is_known_to(view))
            assert view.pages
            worker.serve(20)  # more than the pool holds: evictions
            await until(lambda: worker.is_known_to(view))
            assert view.num_snapshots == 1
            assert view.sequence > 40
            index = PrefixIndex(view.page_size)
            for key, page in view.pages.items():
                assert key == index.next_key(page.parent or index.root_key(""), page.token_ids)
            worker.reset()
            await until(lambda: not view.pages)
            worker.serve()
            await until(lambda: view.pages and worker.is_known_to(view))
            assert view.num_snapshots == 1
        await until(lambda: worker.listeners == 0)
        await worker.stop()

    run_quiet(body())


@pytest.mark.covers("V37")
def test_a_listener_that_comes_back_goes_on_where_it_was_and_gets_a_snapshot_when_that_is_gone():
    async def body() -> None:
        worker = await Worker(num_batches=10).start()
        worker.serve(4)
        await until(lambda: worker.ring.snapshot().sequence >= 8)
        latest = worker.ring.snapshot().sequence
        async with subscribed(worker, "epoch-1", latest - 2) as call:
            found: list[Response] = [await call.read() for _ in range(3)]
            assert [(m.sequence, m.snapshot, m.pool) for m in found] == [(latest - i, False, "unified") for i in (2, 1, 0)]
            assert found[0].timestamp_s > 1e9
            assert found[0].block_size == PAGE_SIZE
        async with subscribed(worker, "epoch-1", latest + 1) as call:  # nothing missed: the next one comes first
            await call.initial_metadata()
            worker.serve()
            first: Response = await call.read()
            assert (first.sequence, first.snapshot) == (latest + 1, False)
        latest = worker.ring.snapshot().sequence
        for epoch, sequence in (
            ("epoch-1", latest - 10),
            ("epoch-1", latest + 2),
            ("epoch-0", latest),
            ("", 0),
            ("epoch-1", -1),
        ):
            async with subscribed(worker, epoch, sequence) as call:
                first = await call.read()
                assert (first.sequence, first.snapshot, first.more) == (latest, True, False)
        async with subscribed(worker, "epoch-1", latest - 9) as call:  # the oldest that is kept
            first = await call.read()
            assert (first.sequence, first.snapshot) == (latest - 9, False)
        await worker.stop()

    run_quiet(body())


@pytest.mark.covers("V37")
def test_a_restarted_worker_is_another_epoch_and_the_view_starts_again():
    async def body() -> None:
        worker = await Worker().start()
        worker.serve(3)
        view = KVCacheView()
        async with following(worker, view):
            await until(lambda: worker.is_known_to(view))
            port = int(worker.address.rpartition(":")[2])
            await worker.stop()
            assert view.pages  # what was known last
            again = await Worker(epoch="epoch-2").start(port)
            again.serve()
            await until(lambda: again.is_known_to(view))
            assert (view.epoch, view.num_snapshots) == ("epoch-2", 2)
        await again.stop()

    run_quiet(body())


@pytest.mark.covers("V37")
def test_a_slow_listener_delays_nobody_and_gets_a_snapshot_in_its_stream():
    async def body() -> None:
        worker = await Worker(num_batches=8, page_size=HUGE_PAGE).start()
        quick, slow = KVCacheView(), KVCacheView()
        async with following(worker, quick), subscribed(worker) as call:
            slow.apply(await call.read())
            await until(lambda: quick.num_snapshots == 1)
            assert await worker.store_huge_pages(200) < 0.5  # 20 MB nobody reads: more than sockets hold
            await until(lambda: quick.sequence == 200, limit_s=90.0)
            while slow.sequence < 200:
                slow.apply(await asyncio.wait_for(call.read(), 30))
            assert slow.num_snapshots >= 2
            assert slow.pages == quick.pages
            assert len(slow.pages) == 200
        await until(lambda: worker.listeners == 0)
        await worker.stop()

    run_quiet(body())


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


def test_a_view_does_not_go_on_after_a_gap():
    def batch(sequence: int, epoch: str = "e") -> Response:
        return Response(epoch=epoch, sequence=sequence, block_size=1)

    view = KVCacheView()
    view.apply(Response(epoch="e", sequence=4, block_size=1, snapshot=True))
    view.apply(batch(5))
    for wrong in (batch(5), batch(7), batch(6, "other")):
        with pytest.raises(SequenceGap, match="wanted batch 6 of epoch 'e'"):
            view.apply(wrong)
    lost = batch(6)
    lost.events.add().removed.block_hashes.append(b"x")
    with pytest.raises(SequenceGap, match="never stored"):
        view.apply(lost)
    assert view.epoch == ""
    with pytest.raises(ValueError, match="update this client"):
        view.apply(Response(snapshot=True, block_size=1, events=[kv_events_pb2.KVEvent()]))


def test_a_ring_takes_every_batch_once():
    async def body() -> None:
        ring = KVEventRing(pool="p", epoch="e", page_size=1, num_batches=2, loop=asyncio.get_running_loop())
        waiting = asyncio.create_task(ring.read(1))
        await asyncio.sleep(0)
        ring.append(Batch(1, 0.0, (Stored((b"a",), None, (1,), b"r"),)))
        assert [batch.sequence for batch in await waiting] == [1]
        with pytest.raises(AssertionError, match="batch 3 after 1"):
            ring.append(Batch(3, 0.0, (Cleared(),)))
        ring.append(Batch(2, 0.0, (Removed((b"a",)),)))
        assert (ring.snapshot().sequence, ring.snapshot().pages) == (2, [])
        late = asyncio.create_task(ring.read(3))
        await asyncio.sleep(0)
        for sequence in (3, 4, 5, 6):
            ring.append(Batch(sequence, 0.0, (Cleared(),)))
        assert await late == []  # woken after the ring had passed on
        assert not ring.has(4)
        assert ring.has(5)

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
