"""Calls of clients that bring no request: gRPC would wait for it as long as the connection lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from jdisagg.api.api_key import CLIENT_SERVICE
from jdisagg.api.codec import refuse
from jdisagg.core.errors import DeadlineExceeded, InvalidRequest, RequestError

REQUEST_TIMEOUT_S = 300.0  # from the beginning of a call to the end of its request, which may be long


class RequestGuard(grpc.aio.ServerInterceptor):
    """Ends such calls of GenerationService: DEADLINE_EXCEEDED after REQUEST_TIMEOUT_S, INVALID_ARGUMENT when none can come any
    more."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's own handler, behind one of a stream of requests, which begins before the first has come."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or not str(handler_call_details.method).startswith(CLIENT_SERVICE):
            return handler
        respond = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def begin(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
            try:
                request = await _first(requests)
            except RequestError as error:
                return refuse(context, error)
            return await respond(request, context)

        kind = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
        return kind(begin, handler.request_deserializer, handler.response_serializer)


async def _first(requests: AsyncIterator[Any]) -> Any:
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            return await anext(requests)
    except TimeoutError:
        raise DeadlineExceeded(f"no request came within {REQUEST_TIMEOUT_S:g} s; send it sooner") from None
    except StopAsyncIteration:
        raise InvalidRequest("the call brought no request; send one") from None
