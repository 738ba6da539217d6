"""A worker whose prefix index is told of on a socket, and those who listen: a view, or a stream read by hand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from time import monotonic

import grpc
import grpc.aio
import pytest

from jdisagg.api.kv_cache_view import KVCacheView
from jdisagg.api.kv_events.ring import KVEventRing
from jdisagg.api.kv_events.service import KVEventsService
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.kv.events import Batch, Stored
from jdisagg.roles.kv_feed import KVEventFeed
from jdisagg.v1 import kv_events_pb2, kv_events_pb2_grpc
from tests.unit.sched.engine_fake import FakeEngine, request
from tests.unit.wire.rig import narrow_channel, start_server

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
