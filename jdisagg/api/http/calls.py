"""What makes a message of an answer's text when there are calls in it: those that were forced, or the model's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from jdisagg.api.generation.edge import Edge
from jdisagg.api.http.body import Body
from jdisagg.api.http.forced_calls import ForcedReader, read_forced
from jdisagg.api.http.free_calls import FreeReader, read_offer
from jdisagg.api.http.tools import may_call
from jdisagg.core.requests import FinishReason


class MessageReader(Protocol):
    """Reads one choice: its whole text at once, or the texts of its deltas."""

    nothing: str | None  # the content of a chunk that has nothing to tell

    @property
    def outcome(self) -> str:
        """What the answer is that was read, one of `CALL_OUTCOMES`."""
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


def reader_of(body: Body, edge: Edge) -> Callable[[], MessageReader] | None:
    """What makes readers for the answers to a chat; None: they are nothing but text. Raises InvalidRequest."""
    if (forced := read_forced(body)) is not None:
        return partial(ForcedReader, forced)
    offer = read_offer(body, edge)
    return None if offer is None else partial(FreeReader, offer)


def is_unread(body: Body, edge: Edge) -> bool:
    """Whether answers may have calls in a format that is not known, which stay text."""
    return edge.call_format is None and may_call(body)
