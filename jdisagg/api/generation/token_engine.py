"""What the edges (gRPC Generate, OpenAI HTTP) talk to: something that turns token requests into token streams.

A worker's own engine (`local_engine` beside this) and a router's fleet (`jdisagg.router.fleet_engine`) both implement it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from jdisagg.core.fleet import ModelCard
from jdisagg.core.requests import EngineRequest, Output


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """`healthy`: the engine thread turns over. `reason`: why no request would be served now; "" = one would."""

    healthy: bool = True
    reason: str = ""

    @property
    def serves(self) -> bool:
        """What /ready and grpc.health.v1 say."""
        return not self.reason


class Enough(Exception):
    """Thrown into a generator whose client has all that it wanted, as a stop string came: an end, and no abort."""


class TokenEngine(Protocol):
    """Asynchronous front of an engine; used from one event loop."""

    @property
    def card(self) -> ModelCard:
        """The served model."""
        ...

    async def first_card(self, deadline_s: float) -> ModelCard:
        """`card`, for a request; at a router without a decode worker so far, waits for one, and not beyond the (monotonic)
        deadline. Raises Unavailable when none came."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[Output]:
        """Yield outputs until one has `finish`. Closing the generator cancels the request and frees everything;
        throwing Enough into it (which comes out again) does so, too, and counts the request as stopped. Of a request that is
        `gathered`, one output may hold what several did; cancelled while it waits for more, it yields those that are there.

        Errors that end the request arrive as the last Output's `error`, or are raised, RequestError: a fleet raises when no
        worker takes it, a worker's engine when it is closed or says nothing, not when it does not admit the request.
        """
        ...

    def health(self) -> Health:
        """Current health, without waiting."""
        ...

    async def debug_state(self) -> dict[str, Any]:
        """Queues, ledgers and streams as JSON-able data; within seconds also when the engine hangs (it then says so)."""
        ...
