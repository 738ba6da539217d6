"""Requests that a browser sends for any page without asking this server first: they are not served.

Before a script's POST of JSON a browser asks whether the page's origin may send it (CORS, a preflight), and is told no unless
`--allowed-origins` names that. It does not ask before a POST whose type a form could have, or that has none (Fetch standard,
"CORS-safelisted request-header"): the page may not read its answer, but that would have been computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jdisagg.api.http.errors import plain_error

_SHOWN = 80  # characters of a header in a message


class ForeignPages:
    """Another application, but for POSTs of pages of other origins that no browser has asked about. Who is no browser sends no
    Origin."""

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        if scope["type"] == "http" and scope["method"] == "POST" and (why := self._why_not(Headers(scope=scope))):
            await plain_error(403, why)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _why_not(self, headers: Headers) -> str:
        """ "" = it is served."""
        origin, kind = headers.get("origin"), headers.get("content-type", "")
        if origin is None or self._allowed & {origin, "*"} or _is_of(origin, headers.get("host", "")) or _is_json(kind):
            return ""
        return (
            f"a page of {origin[:_SHOWN]!r} may not send content-type {kind[:_SHOWN]!r}; send application/json, and have the "
            "server's --allowed-origins name the page's origin"
        )


def _is_of(origin: str, host: str) -> bool:
    """Whether the page came from here, however what stands in front of this server is spoken to."""
    return bool(host) and origin.partition("://")[2] == host.lower()


def _is_json(content_type: str) -> bool:
    """As in `application/json; charset=utf-8`, `application/ld+json`."""
    essence = content_type.partition(";")[0].strip().lower()
    return essence == "application/json" or essence.endswith("+json")
