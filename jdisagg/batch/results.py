"""Output lines of a batch, in OpenAI's form; nothing in them depends on when or in what order the requests ran."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from jdisagg.batch import strict_json
from jdisagg.batch.lines import BadLine, Call

_OK = 200
_INVALID_LINE = "invalid_line"
_RESPONSE = b',"response":'  # in a line as it is written, and in no text in it, where quotes are escaped
_ANSWERED = (_RESPONSE + b'{"status_code":200,', _RESPONSE + b'{"status_code":200}')


def line_id(batch_id: str, number: int) -> str:
    """Names its batch, so that a finished output can be told from those of others."""
    return f"batch_{batch_id}_{number}"


def number_of(line: dict[str, Any]) -> str:
    """The input line's, of an output line."""
    return line["id"].rpartition("_")[2]


def answer_line(
    call: Call, status_code: int, body: dict[str, Any], *, batch_id: str, request_id: str, created: int
) -> dict[str, Any]:
    """The line of a request that was answered, well or badly. `created` (seconds) stands in for the time of the answer."""
    stable = dict(body)
    if "id" in stable:
        kind = stable["id"].partition("-")[0] if isinstance(stable["id"], str) else "answer"
        stable["id"] = f"{kind}-{call.number}"
    if "created" in stable:
        stable["created"] = created
    if isinstance(usage := stable.get("usage"), dict):  # cache hits depend on what ran before
        stable["usage"] = {key: value for key, value in usage.items() if key != "prompt_tokens_details"}
    if isinstance(choices := stable.get("choices"), list):
        stable["choices"] = [_with_stable_calls(choice, f"call_{call.number}_{index}") for index, choice in enumerate(choices)]
    response = {"status_code": status_code, "request_id": request_id, "body": stable}
    return {"id": line_id(batch_id, call.number), "custom_id": call.custom_id, "response": response, "error": None}


def _with_stable_calls(choice: Any, name: str) -> Any:
    """Servers draw the ids of tool calls at random; those that begin with `name` are the same in every run."""
    match choice:
        case {"message": {"tool_calls": [*calls]} as message}:
            named = [
                one | {"id": f"{name}_{i}"} if isinstance(one, dict) and "id" in one else one for i, one in enumerate(calls)
            ]
            return choice | {"message": message | {"tool_calls": named}}
    return choice


def error_line(bad: BadLine, *, batch_id: str) -> dict[str, Any]:
    """The line of an input line that is no request."""
    return _failed(_INVALID_LINE, bad.number, bad.custom_id, bad.message, batch_id)


def bad_answer_line(call: Call, message: str, *, batch_id: str) -> dict[str, Any]:
    """The line of a request whose answer cannot be used."""
    return _failed("invalid_answer", call.number, call.custom_id, message, batch_id)


def is_output_line(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value read back has the form of the lines above."""
    if not isinstance(value, dict) or "response" not in value:
        return False
    response = value["response"]
    return response is None or (isinstance(response, dict) and "status_code" in response)


def is_answered(line: dict[str, Any]) -> bool:
    """Whether an output line is an answer with HTTP status 200."""
    return line["response"] is not None and line["response"]["status_code"] == _OK


def is_answered_as_written(raw: bytes) -> bool:
    """Likewise, of one as a journal holds it: nothing is decoded."""
    return raw.startswith(_ANSWERED, raw.find(_RESPONSE))


def read_output(output: Path) -> Iterator[dict[str, Any] | None]:
    """The lines of a finished output; None for one that no batch wrote."""
    with output.open("rb") as file:
        for raw in file:
            try:
                line = strict_json.decode(raw)
            except ValueError:
                line = None
            yield line if is_output_line(line) else None


def stays(line: dict[str, Any]) -> bool:
    """Whether asking again could not change an output line: it was answered, or its input line is no request."""
    if line["response"] is not None:
        return is_answered(line)
    error = line.get("error")
    return isinstance(error, dict) and error.get("code") == _INVALID_LINE


def weights_of(body: object) -> str | None:
    """The fingerprint of those that an answer is of; None where it does not say."""
    fingerprint = body.get("system_fingerprint") if isinstance(body, dict) else None
    return fingerprint if isinstance(fingerprint, str) else None


def _failed(code: str, number: int, custom_id: str | None, message: str, batch_id: str) -> dict[str, Any]:
    error = {"code": code, "message": message, "line": number}
    return {"id": line_id(batch_id, number), "custom_id": custom_id, "response": None, "error": error}
