"""Calls in a chat's earlier messages: their arguments come as JSON text, which templates want as an object, or as it is."""

from __future__ import annotations

import json
import re
from typing import Any

from jdisagg.api.http.body import MAX_STRUCTURE, num_structures
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.json_values import is_too_deep

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def check_structure(messages: list[dict[str, Any]]) -> None:
    """Raises InvalidRequest for arguments of more lists, objects and keys than a body may have, to which they are text."""
    num = 0
    for index, message in enumerate(messages):
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            match call:
                case {"function": {"arguments": str(arguments)}}:
                    num += num_structures(arguments.encode())
            if num > MAX_STRUCTURE:
                told = f"arguments may have at most {MAX_STRUCTURE} lists, objects and keys, all messages together"
                raise InvalidRequest.of(f"messages[{index}].tool_calls", f"{told}; shorten them")


def with_arguments(call: Any) -> Any:
    """Of a function that takes none some clients leave them out."""
    match call:
        case {"function": dict(function)} if function.get("arguments") is None:
            return {**call, "function": {**function, "arguments": "{}"}}
    return call


def with_objects(message: dict[str, Any], *, always: bool = False) -> dict[str, Any]:
    """The message with arguments of its calls as objects."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_object(call, always) for call in calls]} if isinstance(calls, list) else message


def _with_object(call: Any, always: bool) -> Any:
    """What is no object in JSON stays the text that the model wrote, or is `always` an empty one: for templates that go through
    them, which would refuse the rest of a chat for a call that the model once broke off."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    if not isinstance(arguments := function.get("arguments"), str):
        return call
    value = _object_of(arguments or "{}")
    if value is None and not always:
        return call
    return {**call, "function": {**function, "arguments": _Arguments(value or {}, arguments or "{}")}}


def _object_of(text: str) -> dict[str, Any] | None:
    """None: it is none that a template could write."""
    try:
        value = json.loads(text)
        if _ESCAPED_SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # no half of a pair, see `read_body`
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not is_too_deep(value) else None


class _Arguments(dict[str, Any]):
    """An object to templates that look into it or write it as JSON; to those that just print it, the text that came."""

    def __init__(self, value: dict[str, Any], text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text
