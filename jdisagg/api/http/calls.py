"""What makes a message of an answer's text: there may be calls in it, those that were forced, or the model's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from jdisagg.api.generation.edge import Edge
from jdisagg.api.http.body import Body
from jdisagg.api.http.call_grammars import call_head
from jdisagg.api.http.tools import may_call, read_forced, read_functions
from jdisagg.core.metrics import CALLED, CUT, FORCED, TEXT, UNREAD
from jdisagg.core.requests import FinishReason
from jdisagg.text.calls.forced import Forced
from jdisagg.text.calls.format import CallFormat
from jdisagg.text.calls.reader import Argued, Called, CallReader, Piece, Said


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a model may call, or has to, and how it writes that."""

    call_format: CallFormat
    names: frozenset[str]
    hidden: frozenset[str] = frozenset()  # marks of the format that are special tokens, which the client does not want to see
    in_parallel: bool = True  # False: of several calls the first one counts
    is_forced: bool = False  # there is nothing but calls
    head: str = ""  # of a call whose arguments alone are the answer


def read_offer(body: Body, edge: Edge) -> Offer | None:
    """None: nothing is looked for in the answer. Raises InvalidRequest."""
    in_parallel, skips = body.boolean("parallel_tool_calls", True), body.boolean("skip_special_tokens", True)
    forced, call_format, tokenizer = read_forced(body), edge.call_format, edge.tokenizer
    names = frozenset(function.name for function in read_functions(body)) if forced or may_call(body) else frozenset()
    if forced is not None:
        head = "" if forced.name is None else f"[{call_head(forced.name)}"
        return Offer(call_format=Forced(), names=names, is_forced=True, head=head)
    if call_format is None or not names:
        return None
    marks = (*call_format.marks, *call_format.inner) if skips else ()
    hidden = frozenset(mark for mark in marks if tokenizer.token_id(mark) in tokenizer.special_ids)
    return Offer(call_format=call_format, names=names, hidden=hidden, in_parallel=in_parallel)


class TextReader:
    """Of a choice that is its text."""

    is_text = is_plain = True  # there is nothing but content; it is the text as it comes

    def __init__(self, outcome: str | None) -> None:
        """`outcome`: as in CallsReader; None where no tools were offered."""
        self.nothing: str | None = ""
        self.outcome = outcome

    def message(self, text: str) -> dict[str, Any]:
        """`content` of an answer that is `text`."""
        return {"content": text}

    def news(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Likewise, what `text` adds to it in a stream."""
        return {"content": text} if text else {}

    def finish_reason(self, finish: FinishReason) -> str:
        """Of the text that was read."""
        return finish.value


class CallsReader:
    """Of one choice: its whole text in, or the texts of its deltas; content and calls out, in OpenAI's form."""

    is_text = is_plain = False

    def __init__(self, offer: Offer) -> None:
        self.nothing: str | None = None if offer.is_forced else ""  # the content of a chunk that has nothing to tell
        self._offer = offer
        self._before = offer.head  # of the text that comes first
        self._reader = CallReader(offer.call_format, offer.names, offer.hidden)
        self._index = -1  # of the latest call

    @property
    def outcome(self) -> str:
        """What the answer is that was read, one of `CALL_OUTCOMES`."""
        if self._offer.is_forced:
            return FORCED
        return CUT if self._is_cut() else CALLED if self._index >= 0 else TEXT

    def message(self, text: str) -> dict[str, Any]:
        """`content` and, where there are some or have to be, `tool_calls` of an answer that is `text`; the last one's arguments
        may lack their end."""
        news = self.news(text, is_last=True)
        calls = [{name: value for name, value in part.items() if name != "index"} for part in news.get("tool_calls", ())]
        content = news.get("content", self.nothing)
        return {"content": content or None, "tool_calls": calls} if calls or self._offer.is_forced else {"content": content}

    def news(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Likewise, what `text` adds to them in a stream: of each call a part, the first of which has an id and a name."""
        pieces, self._before = self._reader.push(self._before + text), ""
        if is_last:
            pieces += self._reader.flush()
        said = "" if self._offer.is_forced else "".join(piece.text for piece in pieces if isinstance(piece, Said))
        parts = self._parts(pieces)
        return ({"content": said} if said else {}) | ({"tool_calls": parts} if parts else {})

    def finish_reason(self, finish: FinishReason) -> str:
        """Of the text that was read. As OpenAI has it: a call that was asked for by its name is an ordinary end, and so is what
        a stop string leaves without a whole call."""
        has_calls = self._index >= 0 and not self._is_cut() and not self._offer.head
        return "tool_calls" if finish is FinishReason.STOP and has_calls else finish.value

    def _is_cut(self) -> bool:
        """The last call that is shown is not whole."""
        return self._reader.is_in_call and self._is_shown(self._index)

    def _is_shown(self, index: int) -> bool:
        return self._offer.in_parallel or index == 0

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
        return [_part(index, "".join(arguments[index]), names.get(index)) for index in shown]


MessageReader = TextReader | CallsReader


def reader_of(body: Body, offer: Offer | None) -> Callable[[], MessageReader]:
    """What makes readers for the answers to a chat, of which `offer` was read."""
    if offer is not None:
        return partial(CallsReader, offer)
    return partial(TextReader, UNREAD if may_call(body) else None)  # calls in a format that is not known stay text


def _part(index: int, arguments: str, name: str | None) -> dict[str, Any]:
    """Of call `index` of a message, as streams have it; the first one has its name."""
    if name is None:
        return {"index": index, "function": {"arguments": arguments}}
    call = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{uuid4().hex}", "type": "function", "function": call}
