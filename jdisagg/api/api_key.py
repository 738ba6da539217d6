"""The API key on gRPC: a guard before every service of a server, and channels that send the key with every call.

    authorization: Bearer KEY        metadata of every RPC; health is open to all

Public and internal services share one port, so the processes of a fleet share one key. Clients may have another, which opens
GenerationService alone. While keys are exchanged there are several of either, one a line; the first is the one to send.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from time import monotonic
from typing import Any

import grpc
import grpc.aio

from jdisagg.api.status_details import end_call
from jdisagg.core.logs import Seldom
from jdisagg.core.values import keys_of

log = logging.getLogger(__name__)

HEADER = "authorization"
OPEN_SERVICE = "/grpc.health."
CLIENT_SERVICE = "/jdisagg.v1.GenerationService/"
REFUSED_EVERY_S, CLIENT_REFUSED_EVERY_S = 10.0, 60.0  # as over HTTP, anybody who reaches the port can cause it
REFUSAL = (
    "missing or wrong API key; send the metadata 'authorization: Bearer KEY' "
    "(the processes of a fleet share one key: JDISAGG_API_KEY, or --api-key @FILE)"
)
NOT_FOR_CLIENTS = "; the one sent is --client-api-key, which opens the HTTP API and GenerationService alone"


class KeyGuard(grpc.aio.ServerInterceptor):
    """Ends every RPC without the key with UNAUTHENTICATED, before any of its messages is read."""

    def __init__(self, api_key: str, client_api_key: str | None = None) -> None:
        self._expected = [key.encode() for key in keys_of(api_key)]
        self._of_clients = [key.encode() for key in keys_of(client_api_key)]
        self._seldom = Seldom(every_s=REFUSED_EVERY_S)  # of processes that should be of this fleet
        self._seldom_of_clients = Seldom(every_s=CLIENT_REFUSED_EVERY_S)  # who hide none of those

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's own handler, or one that refuses, and as that of a stream of requests waits for none. Unknown methods
        stay UNIMPLEMENTED."""
        handler, method = await continuation(handler_call_details), str(handler_call_details.method)
        if handler is None or method.startswith(OPEN_SERVICE):
            return handler
        given = _given(handler_call_details.invocation_metadata or ())
        is_client = is_bearer_of(given, self._of_clients)
        if is_bearer_of(given, self._expected) or (is_client and method.startswith(CLIENT_SERVICE)):
            return handler
        refuse = partial(self._refuse, method=method, why=REFUSAL + NOT_FOR_CLIENTS * is_client)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse)
        return grpc.stream_unary_rpc_method_handler(refuse)

    async def _refuse(self, _: Any, context: grpc.aio.ServicerContext, *, method: str, why: str) -> None:
        seldom = self._seldom_of_clients if method.startswith(CLIENT_SERVICE) else self._seldom
        text = "%s of %s was refused: missing or wrong API key"
        seldom.say(log, logging.WARNING, text, method, context.peer(), now_s=monotonic())
        end_call(context, grpc.StatusCode.UNAUTHENTICATED, why)


def is_bearer_of(given: bytes, keys: Iterable[bytes]) -> bool:
    """Whether an `authorization` is `Bearer` and one of the keys; takes the same time for whatever is no key."""
    scheme, _, key = given.partition(b" ")
    matches = [hmac.compare_digest(key, expected) for expected in keys]
    return any(matches) and scheme.lower() == b"bearer"


def _given(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """The one `authorization`; with several there is none."""
    values = [value.encode() if isinstance(value, str) else value for name, value in metadata if name == HEADER]
    return values[0] if len(values) == 1 else b""


class KeyedChannel:
    """What stubs and owners use of a channel, asyncio or blocking; every call carries the key."""

    def __init__(self, channel: Any, api_key: str) -> None:
        self._channel = channel
        self._metadata = ((HEADER, f"Bearer {keys_of(api_key)[0]}"),)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """See grpc.Channel."""
        return self._keyed(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """See grpc.Channel."""
        return self._keyed(self._channel.unary_stream(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """See grpc.Channel."""
        return self._keyed(self._channel.stream_stream(*args, **kwargs))

    def close(self) -> Any:
        """Close the channel; an awaitable of an asyncio one."""
        return self._channel.close()

    def _keyed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return partial(call, metadata=self._metadata)
