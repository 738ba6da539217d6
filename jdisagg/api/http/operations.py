"""What every role serves: /health (/ping), /ready, /metrics, /version, /debug/state."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jdisagg.api.generation.token_engine import TokenEngine
from jdisagg.api.http.errors import plain_error
from jdisagg.api.http.version import package_version
from jdisagg.api.ip import ip_of, is_loopback
from jdisagg.core.metrics import CONTENT_TYPE

_PORT = re.compile(r":\d*$")
FORWARDED = ("x-forwarded-for", "forwarded", "via")  # by which a proxy says that it is one


class Operations:
    """The endpoints."""

    def __init__(self, engine: TokenEngine, metrics_text: Callable[[], str]) -> None:
        self._engine = engine
        self._metrics_text = metrics_text
        self._version = package_version()

    async def health(self, request: Request) -> Response:
        """200 while the engine turns over, else 503 with the reason."""
        health = self._engine.health()
        return _answer(health.healthy, "unhealthy", health.reason)

    async def ready(self, request: Request) -> Response:
        """200 when a request would be served now, else 503 with the reason."""
        health = self._engine.health()
        return _answer(health.serves, "not ready", health.reason)

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        return Response(self._metrics_text(), headers={"content-type": CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        """Of this package."""
        return JSONResponse({"version": self._version})

    async def debug_state(self, request: Request) -> Response:
        """The engine's state, for clients on this machine only, and not for those of a proxy on it, nor for a page in a browser
        whose own name was made to lead here (DNS rebinding)."""
        forwarded = any(name in request.headers for name in FORWARDED)
        if forwarded or request.client is None or not is_loopback(request.client.host):
            return plain_error(403, "/debug/state is served to loopback clients only; ask from the machine itself")
        if not _is_no_other_name(request.headers.get("host", "")):
            return plain_error(403, "/debug/state is not served under other names; ask localhost or an address")
        return JSONResponse(await self._engine.debug_state())

    def routes(self) -> list[Route]:
        """All of these."""
        return [Route(path, partial(serve, self), methods=methods) for path, (serve, *methods) in _ROUTES.items()]


_ROUTES = {  # path: endpoint and methods
    "/health": (Operations.health, "GET"),
    "/ping": (Operations.health, "GET", "POST"),
    "/ready": (Operations.ready, "GET"),
    "/version": (Operations.version, "GET"),
    "/metrics": (Operations.metrics, "GET"),
    "/debug/state": (Operations.debug_state, "GET"),
}
PATHS = frozenset(_ROUTES)


def _is_no_other_name(host: str) -> bool:
    """Of a `Host` header, which browsers always send: an address or localhost, which lead nowhere else."""
    name = _PORT.sub("", host)
    return name.lower() in ("", "localhost") or ip_of(name) is not None


def _answer(good: bool, otherwise: str, reason: str) -> Response:
    if good:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": otherwise, "reason": reason}, status_code=503, headers={"retry-after": "1"})
