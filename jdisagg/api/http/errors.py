"""Errors as OpenAI error objects."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import JSONResponse

from jdisagg.api.status_details import shown
from jdisagg.core.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Deadly,
    JdisaggError,
    ModelNotFound,
    Overloaded,
    Quarantined,
    Unauthenticated,
)

_CODES: dict[type[JdisaggError], str] = {
    ContextLengthExceeded: "context_length_exceeded",
    ModelNotFound: "model_not_found",
    Unauthenticated: "invalid_api_key",
}
_DEADLINES = (
    "; a deadline is the request's timeout_s, and at most --default-deadline-s of the server, or --request-timeout-s of a "
    "batch without one"
)
# OpenAI's clients would by themselves have it computed three times, or end three times as many workers; where one worker ended,
# it is most likely that worker's fault
_NOT_AGAIN = (DeadlineExceeded, Quarantined)


def error_object(error: JdisaggError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    code, message = _CODES.get(type(error)), shown(error.message)
    if isinstance(error, DeadlineExceeded):
        message += _DEADLINES
    return {"error": {"message": message, "type": error.kind, "param": error.field, "code": code}}


def error_response(error: JdisaggError) -> JSONResponse:
    """The error with its HTTP status; 429 and 503 say when to come back, others that it is of no use."""
    if isinstance(error, _NOT_AGAIN) or (isinstance(error, Deadly) and error.num_down > 1):
        return JSONResponse(error_object(error), error.http_status, headers={"x-should-retry": "false"})
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 1.0
    return JSONResponse(error_object(error), error.http_status, headers=_headers(error.http_status, retry_after_s))


def plain_error(status_code: int, message: str) -> JSONResponse:
    """An error of HTTP itself (no such path, wrong method)."""
    kind = "invalid_request_error" if status_code < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return JSONResponse(body, status_code, headers=_headers(status_code, 1.0))


def _headers(status_code: int, retry_after_s: float) -> dict[str, str] | None:
    if status_code in (429, 503):
        return {"retry-after": str(max(1, math.ceil(retry_after_s)))}
    return None
