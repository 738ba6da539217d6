"""An application whose process is about to end: every answer closes its connection.

A client that keeps its connection would come back to this process, behind a load balancer too, and be refused until the end.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Leaving:
    """Another application, until `leave`; then the same one, and the server hangs up after each of its answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._leaves = False

    def leave(self) -> None:
        """From now on. Answers that have begun keep their connection."""
        self._leaves = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._leaves:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, closing)
