"""Chunks that bring text and nothing else, most of an answer: but for their text they are all alike, and written once."""

from __future__ import annotations

import json
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Any

from jdisagg.api.generation.choice import Delta

_HOLE = "\0"  # what the text is while the rest is written; in JSON no other value looks like it
_WRITTEN_HOLE = encode_basestring(_HOLE)


class PlainChunks:
    """Of one answer. Its chunks show nothing of a delta but text, unless it ends a choice or has log-probabilities."""

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
        return f"{around[0]}{encode_basestring(delta.text)}{around[1]}".encode()


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps makes one for each call


def encode_event(event: dict[str, Any]) -> bytes:
    """Its JSON."""
    return _ENCODER.encode(event).encode()
