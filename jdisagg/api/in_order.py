"""Outputs change their form between processes: short ones at once, long ones in a thread, each request's in their order.

Thirty thousand prompt tokens with twenty alternatives each take the better part of a second, in which an event loop that
does nothing else sends no heartbeat: the other side gives up all requests of the stream, and gets the long one again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from jdisagg.api.tasks import start_in
from jdisagg.core.requests import Output
from jdisagg.v1 import common_pb2

log = logging.getLogger(__name__)

LONG_POSITIONS = 256  # scored tokens: with alternatives, some milliseconds to convert or to write
From = TypeVar("From", Output, common_pb2.Output)
To = TypeVar("To")


class InOrder(Generic[From, To]):
    """One direction of one stream. Use from one event loop; `close` it with the stream."""

    def __init__(self, convert: Callable[[From], To], deliver: Callable[[list[To]], None]) -> None:
        self._convert = convert
        self._deliver = deliver
        self._behind: dict[tuple[str, int], deque[From]] = {}  # by request and attempt: a long one, and what came after it
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._bug: Exception | None = None
        self._one_thread = asyncio.Lock()  # more would only take turns with the event loop

    def put(self, outputs: list[From]) -> None:
        """Deliver them: together and at once, but for long ones and those behind them. Raises what a conversion or delivery
        raised, now or before: see `check`."""
        if self._closed:
            return
        self.check()
        try:
            self._put(outputs)
        except Exception as error:
            self._bug = error
            raise

    def check(self) -> None:
        """Raises what went wrong in an earlier `put`, or beside the loop: the stream has lost outputs and is to end."""
        if self._bug is not None:
            raise self._bug

    @property
    def has_waiting(self) -> bool:
        """Some are not delivered yet."""
        return bool(self._behind) and not self._closed and self._bug is None

    def close(self) -> None:
        """Deliver nothing more; idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    def _put(self, outputs: list[From]) -> None:
        at_once: list[To] = []
        for output in outputs:
            if self._behind and (behind := self._behind.get((output.request_id, output.attempt))) is not None:
                behind.append(output)
            elif is_long(output):
                key = output.request_id, output.attempt
                self._behind[key] = deque([output])
                start_in(self._tasks, self._convert_beside(key))
            else:
                at_once.append(self._convert(output))
        if at_once:
            self._deliver(at_once)

    async def _convert_beside(self, key: tuple[str, int]) -> None:
        outputs = self._behind[key]
        try:
            async with self._one_thread:
                converted = [await asyncio.to_thread(self._convert, outputs.popleft())]
            while outputs:
                converted.append(self._convert(outputs.popleft()))
            del self._behind[key]
            self._deliver(converted)
        except Exception as error:
            log.exception("request %s, attempt %d", *key)
            self._bug = error


def is_long(output: Output | common_pb2.Output) -> bool:
    """Whether to convert it takes longer than an event loop may stand still."""
    scored = output.prompt_logprobs  # of a message, each look makes an object
    return scored is not None and len(scored) > LONG_POSITIONS
