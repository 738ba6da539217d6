"""KVEventsService of a worker: streams what its prefix caches hold, from a snapshot or from where a listener was."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc.aio
from google.protobuf.message import Message

from jdisagg.api.codec import refuse
from jdisagg.api.kv_events.codec import encode_batch, encode_snapshot
from jdisagg.api.kv_events.ring import KVEventRing
from jdisagg.api.tasks import cancel_and_wait
from jdisagg.api.unread import Reader, not_taken
from jdisagg.core.errors import ConfigError, DeadlineExceeded, InvalidRequest, JdisaggError, Unavailable
from jdisagg.core.metrics import Metrics
from jdisagg.v1 import kv_events_pb2, kv_events_pb2_grpc


class KVEventsService(kv_events_pb2_grpc.KVEventsServiceServicer):
    """Add it to a grpc.aio server with `add_KVEventsServiceServicer_to_server`; `close` it before the server stops."""

    def __init__(self, rings: Mapping[str, KVEventRing], metrics: Metrics) -> None:
        """`rings` by pool; empty when events are off."""
        self._rings = dict(rings)
        self._metrics = metrics
        self._closed = asyncio.Event()

    async def close(self) -> None:
        """End all streams with UNAVAILABLE and open no more; idempotent."""
        self._closed.set()

    async def Subscribe(self, request: kv_events_pb2.SubscribeRequest, context: grpc.aio.ServicerContext) -> None:
        """Serve one listener until it goes away or the worker stops."""
        try:
            ring = self._ring(request.pool)
        except JdisaggError as error:
            return refuse(context, error)
        await context.send_initial_metadata(())
        write = asyncio.create_task(_write(ring, request, context))
        closed = asyncio.create_task(self._closed.wait())
        self._metrics.cache.event_listeners.inc()
        try:
            await asyncio.wait({write, closed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._metrics.cache.event_listeners.dec()
            await cancel_and_wait(write, closed)
        if not write.cancelled() and (error := write.exception()) is not None:
            if isinstance(error, DeadlineExceeded):
                return refuse(context, error)
            raise error  # our bug, or a broken stream: gRPC tells the listener
        refuse(context, _stopping())

    def _ring(self, pool: str) -> KVEventRing:
        if self._closed.is_set():
            raise _stopping()
        if not self._rings:
            raise ConfigError("KV events are off on this worker; start it with --enable-kv-events")
        names = " or ".join(self._rings)
        if not pool and len(self._rings) > 1:
            raise InvalidRequest(f"pool: got none, wanted {names}: this process has {len(self._rings)}", field="pool")
        ring = self._rings.get(pool) if pool else next(iter(self._rings.values()))
        if ring is None:
            raise InvalidRequest(f"pool: got {pool!r}, wanted {names}", field="pool")
        return ring


async def _write(ring: KVEventRing, request: kv_events_pb2.SubscribeRequest, context: grpc.aio.ServicerContext) -> None:
    """Everything from the listener's position on; `write` waits while the listener does not read."""
    position = request.from_sequence if request.epoch == ring.epoch else 0  # there is no batch 0
    with Reader(context) as reader:
        while True:
            if ring.has(position):
                for batch in await ring.read(position):
                    if not ring.has(position):
                        break  # overtaken while it did not read
                    await _take(reader, encode_batch(ring, batch))
                    position = batch.sequence + 1
            else:
                snapshot = ring.snapshot()
                for message in encode_snapshot(ring, snapshot):
                    await _take(reader, message)
                position = snapshot.sequence + 1


async def _take(reader: Reader, message: Message) -> None:
    if not await reader.takes(message):
        raise DeadlineExceeded(f"KV events: {not_taken('them')}")


def _stopping() -> Unavailable:
    return Unavailable("this worker is draining or stopping; subscribe again when it is back")
