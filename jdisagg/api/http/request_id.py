"""`X-Request-Id`, or `request_id` (vLLM) or `rid` (SGLang) in the body: a client's own name for its call, to be found again in
answers, logs and schedule logs. The header comes first."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jdisagg.api.http.body import Body
from jdisagg.api.http.errors import error_response
from jdisagg.core.errors import InvalidRequest, RequestError

HEADER = "x-request-id"
_IN_BODY = ("request_id", "rid")
MAX_NAME = 128  # characters
_GOOD = re.compile(rf"[\x21-\x7e]{{1,{MAX_NAME}}}")
_KINDS = {"/v1/completions": "cmpl-", "/v1/chat/completions": "chatcmpl-"}
_ID, _SHOWN = "jdisagg.request_id", "jdisagg.shown_request_id"  # keys of the scope


class RequestIdHeader:
    """Every answer, errors included, carries the call's name: the one that came, else its request id. A bad one gets a 400."""

    def __init__(self, app: ASGIApp, refused: Callable[[RequestError], None] | None = None) -> None:
        """`refused` hears of completions that end here."""
        self._app = app
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER) or None  # a proxy may send one that is empty
        bad = given if given is not None and _GOOD.fullmatch(given) is None else None
        _name(scope, given if bad is None else None)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(shown_request_id(scope))
            await send(message)

        if bad is None:
            await self._app(scope, receive, send_named)
            return
        error = _bad_name(HEADER, bad)
        if scope["path"] in _KINDS and self._refused is not None:
            self._refused(error)
        await error_response(error)(scope, receive, send_named)


def request_id_of(request: Request, body: Body) -> str:
    """The id under which engine, logs and answer know the call: `cmpl-..`, `chatcmpl-..`. Raises InvalidRequest for a bad name
    in the body."""
    for field in _IN_BODY:
        given = body.text(field)
        if given is not None and _GOOD.fullmatch(given) is None:
            raise _bad_name(field, given)
        if given is not None and not request.headers.get(HEADER):
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


def _bad_name(field: str, given: str) -> InvalidRequest:
    got = f"{len(given)} characters {ascii(given)[:80]}"
    text = f"{field}: wanted 1 to {MAX_NAME} printable ASCII characters without spaces; got {got}"
    return InvalidRequest(text, field=field)
