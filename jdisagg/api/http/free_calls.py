"""Calls that nothing forces: the model writes them, in a format of its own, or it answers in text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jdisagg.api.generation.edge import Edge
from jdisagg.api.http.body import Body
from jdisagg.api.http.shapes import call_part, whole_calls
from jdisagg.api.http.tools import may_call, read_functions
from jdisagg.core.metrics import CALLED, CUT, TEXT
from jdisagg.core.requests import FinishReason
from jdisagg.text.calls.format import CallFormat
from jdisagg.text.calls.reader import Argued, Called, CallReader, Piece, Said


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a model may call, and how it writes that."""

    call_format: CallFormat
    names: frozenset[str]
    hidden: frozenset[str]  # marks of the format that are special tokens, which the client does not want to see
    in_parallel: bool  # False: of several calls the first one counts


def read_offer(body: Body, edge: Edge) -> Offer | None:
    """None: nothing is looked for in the answer. Raises InvalidRequest."""
    in_parallel, skips = body.boolean("parallel_tool_calls", True), body.boolean("skip_special_tokens", True)
    call_format, tokenizer = edge.call_format, edge.tokenizer
    if call_format is None or not may_call(body):
        return None
    names = frozenset(function.name for function in read_functions(body))
    marks = (*call_format.marks, *call_format.inner) if skips else ()
    hidden = frozenset(mark for mark in marks if tokenizer.token_id(mark) in tokenizer.special_ids)
    return Offer(call_format=call_format, names=names, hidden=hidden, in_parallel=in_parallel)


class FreeReader:
    """Text of one choice in, content and parts of calls out, in OpenAI's form. A MessageReader."""

    def __init__(self, offer: Offer) -> None:
        self.nothing: str | None = ""
        self._reader = CallReader(offer.call_format, offer.names, offer.hidden)
        self._in_parallel = offer.in_parallel
        self._index = -1  # of the latest call

    @property
    def outcome(self) -> str:
        """See MessageReader."""
        return CUT if self._is_cut() else CALLED if self._index >= 0 else TEXT

    def message(self, text: str) -> dict[str, Any]:
        """See MessageReader."""
        news = self.news(text, is_last=True)
        calls = whole_calls(news.get("tool_calls", ()))
        content = news.get("content", "")
        return {"content": content or None, "tool_calls": calls} if calls else {"content": content}

    def news(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """See MessageReader."""
        pieces = self._reader.push(text)
        if is_last:
            pieces += self._reader.flush()
        content = "".join(piece.text for piece in pieces if isinstance(piece, Said))
        parts = self._parts(pieces)
        return ({"content": content} if content else {}) | ({"tool_calls": parts} if parts else {})

    def finish_reason(self, finish: FinishReason) -> str:
        """See MessageReader. As where calls are forced, a call that a stop string cuts off is none to end with."""
        has_calls = self._index >= 0 and not self._is_cut()
        return "tool_calls" if finish is FinishReason.STOP and has_calls else finish.value

    def _is_cut(self) -> bool:
        """The last call that is shown is not whole."""
        return self._reader.is_in_call and self._is_shown(self._index)

    def _is_shown(self, index: int) -> bool:
        return self._in_parallel or index == 0

    def _parts(self, pieces: list[Piece]) -> list[dict[str, Any]]:
        """One for each call that the pieces are of."""
        names, arguments = dict[int, str](), dict[int, list[str]]()
        for piece in pieces:
            if isinstance(piece, Called):
                self._index += 1
                names[self._index] = piece.name
                arguments[self._index] = []
            elif isinstance(piece, Argued):
                arguments.setdefault(self._index, []).append(piece.text)
        shown = filter(self._is_shown, arguments)
        return [call_part(index, "".join(arguments[index]), names.get(index)) for index in shown]
