"""JSON of answers with many scored tokens, in pieces: the writer of one piece lets no other thread run before its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from starlette.responses import JSONResponse, Response

from jdisagg.api.generation.choice import Transcript, has_many_scores
from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.intake import Job

_LEVELS = 5  # of answer, choices, choice, logprobs, tokens; below lies one token


async def whole_response(edge: Edge, job: Job, whole: Callable[[Transcript], dict[str, Any]]) -> Response:
    """The response of a request that does not stream; a long one is made and written beside the event loop."""
    transcript = await edge.complete(job)
    if not has_many_scores(transcript.choices):
        return JSONResponse(whole(transcript))
    content = await edge.beside(lambda: long_json(whole(transcript)))
    return Response(content, media_type="application/json")


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
