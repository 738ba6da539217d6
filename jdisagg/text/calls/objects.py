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
_ARGUMENTS_KEY = re.compile(r'"(?:arguments|parameters)"\s*:')
MOST_BEGUN = 512  # characters of a head, but for arguments that stand before the name


def look_at_object(held: str, *, is_whole: bool) -> Head | Verdict:
    """As CallFormat.look, of a call without a mark. One whose name comes behind its arguments is told when it is whole,
    and those are written anew."""
    begun = held[:MOST_BEGUN]
    if _NONE.match(begun):
        return Verdict.TEXT
    if len(held) > MOST_BEGUN:
        if not _ARGUMENTS_KEY.search(begun):
            return Verdict.TEXT
    elif held.endswith("{") and (head := _HEAD.fullmatch(held)):
        return Head(head[1])
    if not is_whole:
        return Verdict.WAIT if len(held) <= MOST_BEGUN else Verdict.REST
    try:
        call = json.loads(held.lstrip())
        key = next((name for name in _ARGUMENTS if name in call), None)
        if key is None or not isinstance(call.get("name"), str) or not isinstance(call[key], dict):
            return Verdict.TEXT
        return Head(call["name"], is_wrapped=False, arguments=json.dumps(call[key], allow_nan=False))
    except (ValueError, RecursionError):  # no JSON; ValueError also for numbers that are beyond a float
        return Verdict.TEXT
