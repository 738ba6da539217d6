"""How answers become JSON: whole ones, chunks, and those that are so long that a thread of its own writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from json.encoder import encode_basestring
from typing import Any

from starlette.responses import JSONResponse, Response

from jdisagg.api.generation.choice import Delta, Transcript, has_many_scores
from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.intake import Job

_LEVELS = 5  # of answer, choices, choice, logprobs, tokens; below lies one token
LONG_IDS = 16_384  # of tokens: two milliseconds to write
LONG_TEXT = 16_384  # characters: to look for calls in them may take 30 ms
_SLICE = 4096  # of a list of them, at once
_HOLE = "\0"  # what the text is while the rest is written; in JSON no other value looks like it
_WRITTEN_HOLE = encode_basestring(_HOLE)
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps makes one for each call


async def whole_response(edge: Edge, job: Job, whole: Callable[[Transcript], dict[str, Any]], *, shows_ids: bool) -> Response:
    """The response of a request that does not stream; a long one is made and written beside the event loop. `shows_ids`: of
    tokens, each choice its prompt's too."""
    transcript = await edge.complete(job)
    has_much = has_many_scores(transcript.choices) or _has_long_texts(transcript)
    if not has_much and not (shows_ids and _has_many_ids(job, transcript)):
        return JSONResponse(whole(transcript))
    content = await edge.beside(lambda: long_json(whole(transcript)))
    return Response(content, media_type="application/json")


def _has_long_texts(transcript: Transcript) -> bool:
    return sum(len(text) for choice in transcript.choices for text in choice.texts) > LONG_TEXT


def _has_many_ids(job: Job, transcript: Transcript) -> bool:
    """As `has_many_scores`. In chat a prompt is shown once, but as many beside the event loop cost nothing."""
    num_prompt = sum(len(request.prompt_token_ids) for request in job.requests)
    return num_prompt + sum(len(choice.token_ids) for choice in transcript.choices) > LONG_IDS


def long_json(answer: dict[str, Any]) -> bytes:
    """As a short answer is written, for a thread of its own: in pieces, as no other thread runs before the end of one."""
    return b"".join(map(str.encode, _pieces(answer, _LEVELS)))


def encode_event(event: dict[str, Any]) -> bytes:
    """Its JSON."""
    return _in_one_line(_ENCODER.encode(event)).encode()


def long_event(event: dict[str, Any]) -> bytes:
    """As `encode_event`, in the way of `long_json`."""
    return "".join(map(_in_one_line, _pieces(event, _LEVELS))).encode()


class PlainChunks:
    """Chunks of one answer that bring text and nothing else, most of them: but for their text they are all alike, and written
    once. They show nothing of a delta but text, unless it ends a choice or has log-probabilities."""

    def __init__(self, write: Callable[[Delta], dict[str, Any]]) -> None:
        """`write` makes the chunk of a delta with an index, a text and a fingerprint."""
        self._write = write
        self._around: dict[tuple[int, str | None], tuple[str, str]] = {}  # what is before the text, and behind it

    def chunk(self, delta: Delta, fingerprint: str | None) -> bytes | None:
        """The JSON; None for a delta that has more to say than its text, or nothing. `fingerprint`: of who answers."""
        if not delta.text or delta.finish is not None or delta.logprobs or delta.prompt_logprobs:
            return None
        around = self._around.get((delta.index, fingerprint))
        if around is None:
            event = self._write(Delta(index=delta.index, text=_HOLE, fingerprint=fingerprint))
            before, behind = encode_event(event).decode().split(_WRITTEN_HOLE)
            around = self._around[delta.index, fingerprint] = before, behind
        return f"{around[0]}{_in_one_line(encode_basestring(delta.text))}{around[1]}".encode()


def _in_one_line(written: str) -> str:
    """Without what Python's `splitlines` takes for the end of a line, and clients who read events by it: httpx and others."""
    return written.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _pieces(value: Any, levels: int) -> Iterator[str]:
    if levels and isinstance(value, dict):
        opening = "{"
        for key, item in value.items():
            yield f"{opening}{json.dumps(key, ensure_ascii=False)}:"
            yield from _pieces(item, levels - 1)
            opening = ","
        yield "}" if value else "{}"
    elif levels and isinstance(value, list | tuple) and value and isinstance(value[0], int):  # of numbers many at a time
        for begin in range(0, len(value), _SLICE):
            yield f"{',' if begin else '['}{_dumps(value[begin : begin + _SLICE])[1:-1]}"
        yield "]"
    elif levels and isinstance(value, list):
        opening = "["
        for item in value:
            yield opening
            yield from _pieces(item, levels - 1)
            opening = ","
        yield "]" if value else "[]"
    else:
        yield _dumps(value)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
