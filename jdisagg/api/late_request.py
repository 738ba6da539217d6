"""Calls of clients that bring no request: gRPC would wait for it as long as the connection lives.

What has come of one is in memory, where nobody is told of it: up to 21 MiB (`channels.MAX_RECEIVED_BYTES`) that end with their
last byte or with the call. So of calls whose request takes its time there are only so many.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from jdisagg.api.api_key import CLIENT_SERVICE, OPEN_SERVICE
from jdisagg.api.codec import refuse
from jdisagg.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestError

REQUEST_TIMEOUT_S = 300.0  # from the beginning of a call to the end of its request, which may be long
SLOW_S = 1.0  # of hundreds that come together each takes a twentieth of it
LATE_S = 0.2  # that an event loop is behind: what it would hear of by now it has not heard of
MOST_SLOW = 24  # calls: some 512 MiB together, as of bodies over HTTP
_RETRY_AFTER_S = 5.0


class SlowRequests:
    """Calls whose request has not come within SLOW_S. Beyond MOST_SLOW of them the oldest is ended. Use from one event loop."""

    def __init__(self) -> None:
        self._timers: dict[asyncio.Timeout, asyncio.TimerHandle] = {}  # of all that wait
        self._slow: dict[asyncio.Timeout, None] = {}  # the oldest first

    @contextmanager
    def watch(self, limit: asyncio.Timeout) -> Iterator[None]:
        """For one call, which waits for its request within this and within `limit`, which ends it at once if need be."""
        self._look_later(limit)
        try:
            yield
        finally:
            self._timers.pop(limit).cancel()
            self._slow.pop(limit, None)

    def _look_later(self, limit: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + SLOW_S
        self._timers[limit] = loop.call_at(due_s, self._look, limit, due_s)

    def _look(self, limit: asyncio.Timeout, due_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s > due_s + LATE_S:
            self._look_later(limit)
            return
        self._slow[limit] = None
        if len(self._slow) > MOST_SLOW:
            oldest = next(iter(self._slow))
            del self._slow[oldest]
            if not oldest.expired():
                oldest.reschedule(now_s)


class RequestGuard(grpc.aio.ServerInterceptor):
    """Ends such calls of GenerationService, and of health, which asks for no key: DEADLINE_EXCEEDED after REQUEST_TIMEOUT_S,
    RESOURCE_EXHAUSTED when there are too many that take long, INVALID_ARGUMENT when no request can come any more."""

    def __init__(self) -> None:
        self._slow, self._slow_without_key = SlowRequests(), SlowRequests()  # who has no key ends nobody's call who has

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's own handler, behind one of a stream of requests, which begins before the first has come."""
        handler, method = await continuation(handler_call_details), str(handler_call_details.method)
        if handler is None or handler.request_streaming or not method.startswith((CLIENT_SERVICE, OPEN_SERVICE)):
            return handler
        slow = self._slow_without_key if method.startswith(OPEN_SERVICE) else self._slow
        respond = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def begin(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
            try:
                request = await _first(requests, slow)
            except RequestError as error:
                return refuse(context, error)
            return await respond(request, context)

        kind = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
        return kind(begin, handler.request_deserializer, handler.response_serializer)


async def _first(requests: AsyncIterator[Any], slow: SlowRequests) -> Any:
    until_s = asyncio.get_running_loop().time() + REQUEST_TIMEOUT_S
    limit = asyncio.timeout_at(until_s)
    try:
        async with limit:
            with slow.watch(limit):
                return await anext(requests)
    except TimeoutError:
        if limit.when() == until_s:
            raise DeadlineExceeded(f"no request came within {REQUEST_TIMEOUT_S:g} s; send it sooner") from None
        told = f"more than {MOST_SLOW} requests take longer than {SLOW_S:g} s to come, this one longest; come again"
        raise Overloaded(told, retry_after_s=_RETRY_AFTER_S) from None
    except StopAsyncIteration:
        raise InvalidRequest("the call brought no request; send one") from None
