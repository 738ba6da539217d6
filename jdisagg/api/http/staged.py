"""One application for the whole life of a process: while it loads and compiles it is alive and not ready, then it serves, and
when it is about to end every answer closes its connection. A client that kept one would come back to this process, behind a
load balancer too, and be refused until the end.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jdisagg.api.http.errors import error_response
from jdisagg.api.http.request_id import RequestIdHeader
from jdisagg.api.http.version import package_version
from jdisagg.core.errors import Unavailable

REASON = "starting: the model is being loaded and compiled"


class StagedApp:
    """An application that becomes another one, and then leaves."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None
        self._leaves = False

    def serve(self, app: ASGIApp) -> None:
        """From now on requests are `app`'s."""
        self._app = app

    def leave(self) -> None:
        """From now on answers end their connections. Those that have begun keep theirs."""
        self._leaves = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._leaves:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        app: ASGIApp = self._app or RequestIdHeader(_answer(scope["path"]))
        await app(scope, receive, closing)


def _answer(path: str) -> Response:
    if path in ("/health", "/ping"):
        return JSONResponse({"status": "ok"})
    if path == "/version":
        return JSONResponse({"version": package_version()})
    if path == "/ready":
        return JSONResponse({"status": "not ready", "reason": REASON}, status_code=503, headers={"retry-after": "1"})
    return error_response(Unavailable(f"{REASON}; ask again when /ready answers 200"))
