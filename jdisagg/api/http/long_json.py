"""JSON of answers with many scored tokens, in pieces: the writer of one piece lets no other thread run before its end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_LEVELS = 5  # of answer, choices, choice, logprobs, tokens; below lies one token


def long_json(answer: dict[str, Any]) -> bytes:
    """As a short answer is written, for a thread of its own."""
    return "".join(_pieces(answer, _LEVELS)).encode()


def _pieces(value: Any, levels: int) -> Iterator[str]:
    if levels and isinstance(value, dict):
        opening = "{"
        for key, item in value.items():
            yield f"{opening}{json.dumps(key, ensure_ascii=False)}:"
            yield from _pieces(item, levels - 1)
            opening = ","
        yield "}" if value else "{}"
    elif levels and isinstance(value, list):
        opening = "["
        for item in value:
            yield opening
            yield from _pieces(item, levels - 1)
            opening = ","
        yield "]" if value else "[]"
    else:
        yield json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
