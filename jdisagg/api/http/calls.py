"""What makes a message of an answer's text: there may be calls in it, those that were forced, or the model's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from jdisagg.api.generation.edge import Edge
from jdisagg.api.http.body import Body
from jdisagg.api.http.forced_calls import ForcedReader, read_forced
from jdisagg.api.http.free_calls import FreeReader, read_offer
from jdisagg.api.http.tools import may_call
from jdisagg.core.metrics import UNREAD
from jdisagg.core.requests import FinishReason


class MessageReader(Protocol):
    """Reads one choice: its whole text at once, or the texts of its deltas."""

    nothing: str | None  # the content of a chunk that has nothing to tell

    @property
    def outcome(self) -> str | None:
        """What the answer is that was read, one of `CALL_OUTCOMES`; None where no tools were offered."""
        ...

    def message(self, text: str) -> dict[str, Any]:
        """`content` and, where there are some, `tool_calls` of an answer that is `text`."""
        ...

    def news(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Likewise, what `text` adds to them in a stream."""
        ...

    def finish_reason(self, finish: FinishReason) -> str:
        """Of the text that was read."""
        ...


class TextReader:
    """Of an answer that is its text. A MessageReader."""

    def __init__(self, outcome: str | None) -> None:
        self.nothing: str | None = ""
        self.outcome = outcome

    def message(self, text: str) -> dict[str, Any]:
        """See MessageReader."""
        return {"content": text}

    def news(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """See MessageReader."""
        return {"content": text} if text else {}

    def finish_reason(self, finish: FinishReason) -> str:
        """See MessageReader."""
        return finish.value


def reader_of(body: Body, edge: Edge) -> Callable[[], MessageReader]:
    """What makes readers for the answers to a chat. Raises InvalidRequest."""
    if (forced := read_forced(body)) is not None:
        return partial(ForcedReader, forced)
    if (offer := read_offer(body, edge)) is not None:
        return partial(FreeReader, offer)
    return partial(TextReader, UNREAD if may_call(body) else None)  # calls in a format that is not known stay text
