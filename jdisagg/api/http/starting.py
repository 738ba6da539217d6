"""What a worker answers over HTTP while it loads and compiles: that it is alive, and not ready."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jdisagg.api.http.errors import error_response
from jdisagg.api.http.request_id import RequestIdHeader
from jdisagg.api.http.version import package_version
from jdisagg.core.errors import Unavailable

REASON = "starting: the model is being loaded and compiled"


class StartingApp:
    """An application that becomes another one."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None

    def serve(self, app: ASGIApp) -> None:
        """From now on requests are `app`'s."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        app: ASGIApp = self._app or RequestIdHeader(_answer(scope["path"]))
        await app(scope, receive, send)


def _answer(path: str) -> Response:
    if path in ("/health", "/ping"):
        return JSONResponse({"status": "ok"})
    if path == "/version":
        return JSONResponse({"version": package_version()})
    if path == "/ready":
        return JSONResponse({"status": "not ready", "reason": REASON}, status_code=503)
    return error_response(Unavailable(f"{REASON}; ask again when /ready answers 200"))
