"""`X-Request-Id`: a client's own name for its call, to be found again in answers, logs and schedule logs."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jdisagg.api.http.errors import error_response
from jdisagg.core.errors import InvalidRequest

HEADER = "x-request-id"
_GOOD = re.compile(r"[\x21-\x7e]{1,128}")
_KEY = "jdisagg.request_id"


class RequestIdHeader:
    """Every answer carries the call's id: the one that came, else a new one. A bad one is answered with 400."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER)
        if given is not None and _GOOD.fullmatch(given) is None:
            got = f"{len(given)} characters {ascii(given)[:80]}"
            text = f"{HEADER}: wanted 1 to 128 printable ASCII characters without spaces; got {got}"
            await error_response(InvalidRequest(text, field=HEADER))(scope, receive, send)
            return
        scope[_KEY] = given
        name = given or uuid.uuid4().hex

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = scope.get(_KEY) or name
            await send(message)

        await self._app(scope, receive, send_named)


def new_request_id(request: Request, kind: str) -> str:
    """`kind-ID`: unique even when a client sends the same header twice; the answer's header tells what to look for."""
    given, fresh = request.scope.get(_KEY), uuid.uuid4().hex
    request_id = f"{kind}-{fresh}" if given is None else f"{kind}-{given}-{fresh[:8]}"
    if given is None:
        request.scope[_KEY] = request_id
    return request_id
