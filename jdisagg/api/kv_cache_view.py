"""A listener to a worker's KV events: the pages of its prefix cache, here.

view = KVCacheView()
task = asyncio.create_task(view.follow("127.0.0.1:9001"))
...
view.pages  # hash -> CachedPage(parent, token_ids, root), as of batch view.sequence
task.cancel()
"""

from __future__ import annotations

import asyncio
import logging

import grpc
import grpc.aio

from jdisagg.api.channels import INSECURE, Credentials, open_channel
from jdisagg.api.kv_events.codec import decode_events
from jdisagg.core.told import told
from jdisagg.kv.events import CachedPage, CachedPages, digest
from jdisagg.v1 import kv_events_pb2, kv_events_pb2_grpc

log = logging.getLogger(__name__)

RETRY_S = 0.25
_HOPELESS = (
    *(grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT),
    *(grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED),
)


class SequenceGap(ValueError):
    """A message does not follow the one before: the set is no longer known, subscribe again."""


class KVCacheView:
    """One pool of one worker. Lives on one event loop; read it between awaits."""

    def __init__(self, *, pool: str = "") -> None:
        """`pool`: "prefill" or "decode" of a colocated process; "" = the only one."""
        self.epoch = ""  # of the worker's process; "" = nothing was heard yet
        self.sequence = 0  # last batch applied
        self.pool = pool
        self.num_snapshots = 0  # taken so far: 1, plus once for every restart of the worker and every time we were too slow
        self._set = CachedPages(page_size=1)
        self._parts: CachedPages | None = None  # of a snapshot that is not complete

    @property
    def pages(self) -> dict[bytes, CachedPage]:
        """Page hash -> what it holds. Do not change it; a snapshot replaces it."""
        return self._set.pages

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._set.page_size

    @property
    def digest(self) -> str:
        """Equal to `scheduler.prefix_cache.digest` of the worker's `/debug/state` when both know the same pages."""
        return digest(self.pages)

    def apply(self, message: kv_events_pb2.SubscribeResponse) -> None:
        """Take the next message in. Raises SequenceGap when it does not fit what is known here, which then waits for a
        snapshot; ValueError for a message that nobody could read."""
        if message.snapshot:
            self._take_part(message)
            return
        if (message.epoch, message.sequence) != (self.epoch, self.sequence + 1):
            wanted = f"batch {self.sequence + 1} of epoch {self.epoch!r}"
            raise SequenceGap(f"got batch {message.sequence} of epoch {message.epoch!r}, wanted {wanted} or a snapshot")
        try:
            self._set.apply(decode_events(message))
        except KeyError as error:
            self.epoch = ""
            raise SequenceGap(f"batch {message.sequence} removes a page that was never stored") from error
        self.sequence = message.sequence

    async def follow(self, address: str, *, credentials: Credentials = INSECURE) -> None:
        """Keep the view current until cancelled, through restarts of the worker. While it is away the last view stays.

        Raises grpc.aio.AioRpcError when asking again cannot help, as events are off there or it has no such pool; ValueError
        for a message that nobody could read.
        """
        while True:
            channel = open_channel(address, credentials)
            try:
                await self._listen(kv_events_pb2_grpc.KVEventsServiceStub(channel))
            except grpc.aio.AioRpcError as error:
                if error.code() in _HOPELESS:
                    raise
                log.info("KV events of %s: %s; subscribing again", address, told(error.details() or ""))
            except SequenceGap as error:
                log.warning("KV events of %s: %s; subscribing again", address, error)
                self.epoch = ""
            finally:
                self._parts = None
                await channel.close()
            await asyncio.sleep(RETRY_S)

    async def _listen(self, stub: kv_events_pb2_grpc.KVEventsServiceStub) -> None:
        request = kv_events_pb2.SubscribeRequest(epoch=self.epoch, from_sequence=self.sequence + 1, pool=self.pool)
        async for message in stub.Subscribe(request):
            self.apply(message)

    def _take_part(self, message: kv_events_pb2.SubscribeResponse) -> None:
        if self._parts is None:
            self._parts = CachedPages(message.block_size)
        self._parts.apply(decode_events(message))
        if message.more:
            return
        self._set, self._parts = self._parts, None
        self.epoch, self.sequence = message.epoch, message.sequence
        self.num_snapshots += 1
