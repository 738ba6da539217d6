"""What a batch's server answers, as it is kept and quoted."""

from __future__ import annotations

from typing import Any

import httpx

from jdisagg.batch import strict_json
from jdisagg.batch.tries import Answer, BadAnswer

SHOWN_BYTES = 200  # of an answer that is quoted in a message


def retry_after_s(response: httpx.Response) -> float:
    """How long the server wants to be left alone; 0 where it does not say, or names a date."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdecimal() else 0.0


def read_answer(response: httpx.Response) -> Answer:
    """Status and body. Raises BadAnswer for a success that cannot be kept."""
    try:
        return response.status_code, _read_object(response.content)
    except BadAnswer as error:
        if response.is_success:
            raise
        return response.status_code, {"error": {"message": error.message, "type": error.kind}}


def _read_object(content: bytes) -> dict[str, Any]:
    try:
        body = strict_json.decode(content)
    except ValueError as error:
        raise BadAnswer(f"the server answered no JSON object: {error}: {shown(content)}") from error
    if not isinstance(body, dict):
        raise BadAnswer(f"the server answered no JSON object: {shown(content)}")
    if flaw := strict_json.flaw(body):
        raise BadAnswer(f"the server's answer cannot be kept as JSON: {flaw}")
    return body


def shown(content: bytes) -> str:
    """The beginning of a body, for a message."""
    return content[:SHOWN_BYTES].decode(errors="replace") or "(nothing)"
