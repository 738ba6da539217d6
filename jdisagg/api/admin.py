"""AdminService: drain, stats, prefix cache reset, each done by an injected callable."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from jdisagg.api.codec import refuse
from jdisagg.api.status_details import end_call
from jdisagg.core.errors import RequestError
from jdisagg.v1 import admin_pb2, admin_pb2_grpc

log = logging.getLogger(__name__)

_NO_PREFIX_CACHE = "a router has no prefix cache; ask the workers (`python -m jdisagg.fleet list` names them)"


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Add it to a grpc.aio server with `add_AdminServiceServicer_to_server`."""

    def __init__(
        self,
        *,
        drain: Callable[[float], Awaitable[int]],
        stats: Callable[[], Awaitable[dict[str, Any]]],
        reset_prefix_cache: Callable[[], Awaitable[int]] | None,
    ) -> None:
        """`drain(deadline_s)` returns the unfinished requests, `stats()` JSON-able data, `reset_prefix_cache()` how many pages
        it forgot. None for it: there is no prefix cache here."""
        self._drain = drain
        self._stats = stats
        self._reset_prefix_cache = reset_prefix_cache
        self._drains: set[asyncio.Task[int]] = set()

    async def Drain(self, request: admin_pb2.DrainRequest, context: grpc.aio.ServicerContext) -> admin_pb2.DrainResponse:
        """Stop admitting and wait. Once begun it goes on whatever becomes of the RPC: half a drain is none."""
        log.info("%s asks this process to drain within %.3g s", unquote(context.peer()), request.deadline_ms / 1000)
        drain = asyncio.ensure_future(self._drain(monotonic() + request.deadline_ms / 1000))
        self._drains.add(drain)
        drain.add_done_callback(self._drained)
        return admin_pb2.DrainResponse(unfinished=await asyncio.shield(drain))

    def _drained(self, drain: asyncio.Task[int]) -> None:
        self._drains.discard(drain)
        if drain.cancelled():
            return
        if (error := drain.exception()) is not None:
            log.error("a drain failed", exc_info=error)  # who asked for it may be gone
        elif unfinished := drain.result():
            log.warning("requests still running at the drain's deadline: %d", unfinished)
        else:
            log.info("drained: every request has ended")

    async def Stats(self, request: admin_pb2.StatsRequest, context: grpc.aio.ServicerContext) -> admin_pb2.StatsResponse:
        """The state as JSON."""
        return admin_pb2.StatsResponse(json=json.dumps(await self._stats()))

    async def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ResetPrefixCacheResponse | None:
        """Forget cached prefixes. UNIMPLEMENTED where there are none: UNAVAILABLE would invite to ask again."""
        if self._reset_prefix_cache is None:
            return end_call(context, grpc.StatusCode.UNIMPLEMENTED, _NO_PREFIX_CACHE)
        try:
            pages_freed = await self._reset_prefix_cache()
        except RequestError as error:
            return refuse(context, error)
        return admin_pb2.ResetPrefixCacheResponse(pages_freed=pages_freed)
