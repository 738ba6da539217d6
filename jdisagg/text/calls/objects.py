"""Calls that are an object in JSON: `{"name": "f", "arguments": {..}}`; Llama says `parameters`."""

from __future__ import annotations

import json
import re

from jdisagg.text.calls.format import Head, Verdict

_ARGUMENTS = ("arguments", "parameters")
_HEAD = re.compile(  # as nearly all models write it: the name first
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{'
)
_NONE = re.compile(r'\s*(?:[^\s{]|\{\s*(?:[^\s"]|"(?!(?:name|type|id|arguments|parameters)")[^"]*"))')
_DECODER = json.JSONDecoder()


def look_at_object(held: str, *, is_whole: bool) -> Head | Verdict:
    """As CallFormat.look, of a call without a mark. One whose name comes behind its arguments is told when it is whole."""
    if _NONE.match(held):
        return Verdict.TEXT
    if held.endswith("{") and (head := _HEAD.fullmatch(held)):
        return Head(head[1])
    if not is_whole:
        return Verdict.WAIT
    try:
        call, _ = _DECODER.raw_decode(held.lstrip())
    except (ValueError, RecursionError):
        return Verdict.TEXT
    arguments = next((call[name] for name in _ARGUMENTS if name in call), None)
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return Verdict.TEXT
    return Head(call["name"], is_wrapped=False, arguments=json.dumps(arguments, ensure_ascii=False))
