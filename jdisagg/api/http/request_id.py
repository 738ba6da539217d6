"""`X-Request-Id`, or `request_id` (vLLM) or `rid` (SGLang) in the body: a client's own name for its call, to be found again in
answers, logs and schedule logs. The header comes first."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jdisagg.api.http.body import Body
from jdisagg.core.errors import InvalidRequest

HEADER = "x-request-id"
_IN_BODY = ("request_id", "rid")
MAX_NAME = 128  # characters
_GOOD = re.compile(rf"[\x21-\x7e]{{1,{MAX_NAME}}}")
_KINDS = {"/v1/completions": "cmpl-", "/v1/chat/completions": "chatcmpl-"}
_ID, _SHOWN = "jdisagg.request_id", "jdisagg.shown_request_id"  # keys of the scope


class RequestIdHeader:
    """Every answer, errors included, carries the call's name: the one that came, else its request id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        _name(scope, given if _GOOD.fullmatch(given) else None)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(shown_request_id(scope))
            await send(message)

        await self._app(scope, receive, send_named)


def request_id_of(request: Request, body: Body) -> str:
    """The id under which engine, logs and answer know the call: `cmpl-..`, `chatcmpl-..`. Raises InvalidRequest for a bad
    name."""
    in_header = request.headers.get(HEADER) or None  # a proxy may send one that is empty
    for field, given in ((HEADER, in_header), *((field, body.text(field)) for field in _IN_BODY)):
        if given is None:
            continue
        if _GOOD.fullmatch(given) is None:
            got = f"{len(given)} characters {ascii(given)[:80]}"
            raise InvalidRequest.of(field, f"wanted 1 to {MAX_NAME} printable ASCII characters without spaces; got {got}")
        if in_header is None:
            _name(request.scope, given)
            break
    return request.scope[_ID]


def _name(scope: Scope, given: str | None) -> None:
    kind, fresh = _KINDS.get(scope["path"], ""), uuid.uuid4().hex
    # part of it is always fresh: a client may send the same name twice
    scope[_ID] = f"{kind}{given}-{fresh[:8]}" if given is not None else f"{kind}{fresh}"
    scope[_SHOWN] = given if given is not None else scope[_ID]


def logged_request_id(scope: Scope) -> str:
    """The id under which engine and logs know a call, for what is logged beside its endpoint."""
    return scope.get(_ID, "without an id")


def shown_request_id(scope: Scope) -> dict[str, str]:
    """The header of the answer; for answers that are made outside of `RequestIdHeader`."""
    return {HEADER: scope[_SHOWN]} if _SHOWN in scope else {}
