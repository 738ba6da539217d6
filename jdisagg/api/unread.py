"""Messages that a client does not take: one that reads nothing for long, or little for longer, is gone, and what waits for it
is dropped."""

from __future__ import annotations

import asyncio
from math import inf
from time import monotonic
from typing import Any

import grpc.aio
from google.protobuf.message import Message

UNREAD_TIMEOUT_S = 60.0  # over HTTP, too (`http/protocol.py`); a large message may take longer:
SLOWEST_BYTES_PER_S = 2**16
SLOWEST_IN_ALL_BYTES_PER_S = 2**13  # of the time in which something waits for the client; a quick one makes none wait
OURS_S = 1.0  # of a message's time, which may be ours: a busy loop


class Reader:
    """Who takes the messages of one call. `with Reader(context) as reader`, in the task that writes: one timer for all of them,
    which looks again when it is due; one for each message costs as much as its encoding."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context
        self._left_s = UNREAD_TIMEOUT_S
        self._writing: asyncio.Task[Any] | None = None  # while a message waits to be taken
        self._until_s = inf  # it may wait so long
        self._is_late = False
        self._look_s = inf  # when the timer is due
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def takes(self, message: Message) -> bool:
        """Write it; False when the client does not take it, or has let too much of all that came before wait."""
        num_bytes, began_s = message.ByteSize(), monotonic()
        self._left_s += num_bytes / SLOWEST_IN_ALL_BYTES_PER_S
        self._until_s = began_s + min(UNREAD_TIMEOUT_S + num_bytes / SLOWEST_BYTES_PER_S, self._left_s)
        if self._until_s <= began_s:
            return False
        if self._until_s < self._look_s:
            self._look_at(self._until_s)
        self._writing = asyncio.current_task()
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            if self._is_late and self._writing is not None and not self._writing.uncancel():
                return False
            raise  # its call was cancelled
        finally:
            self._writing = None
        self._left_s -= max(0.0, monotonic() - began_s - OURS_S)
        return True

    def _look_at(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._look_s = at_s
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at_s - monotonic()), self._look)

    def _look(self) -> None:
        self._timer, self._look_s = None, inf
        if self._writing is not None and monotonic() < self._until_s:
            self._look_at(self._until_s)
        elif self._writing is not None:
            self._is_late = True
            self._writing.cancel()


def not_taken(what: str) -> str:
    """What to tell the client, should it read after all."""
    return f"nothing of {what} was taken for {UNREAD_TIMEOUT_S:g} s; read sooner"
