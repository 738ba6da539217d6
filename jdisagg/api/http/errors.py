"""Errors as OpenAI error objects."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import JSONResponse

from jdisagg.api.intake import ContextLengthExceeded
from jdisagg.core.errors import JdisaggError, ModelNotFound, Overloaded, Unauthenticated

_CODES: dict[type[JdisaggError], str] = {
    ContextLengthExceeded: "context_length_exceeded",
    ModelNotFound: "model_not_found",
    Unauthenticated: "invalid_api_key",
}


def error_object(error: JdisaggError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    code = _CODES.get(type(error))
    return {"error": {"message": error.message, "type": error.kind, "param": error.field, "code": code}}


def error_response(error: JdisaggError) -> JSONResponse:
    """The error with its HTTP status; 429 says when to come back."""
    headers = {"retry-after": str(max(1, math.ceil(error.retry_after_s)))} if isinstance(error, Overloaded) else None
    return JSONResponse(error_object(error), status_code=error.http_status, headers=headers)


def plain_error(status_code: int, message: str) -> JSONResponse:
    """An error of HTTP itself (no such path, wrong method)."""
    kind = "invalid_request_error" if status_code < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status_code=status_code)
