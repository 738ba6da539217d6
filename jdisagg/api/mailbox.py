"""What comes for one reader: a queue of which everything that is there can be taken at once.

asyncio.Queue with a time-out for each `get` costs a third of a streamed token's way through a router. Whoever wants to be woken
at a deadline has it put here, once: `loop.call_later(seconds, mailbox.put, ..)`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Unbounded. Use from one event loop; one task reads."""

    def __init__(self, wake_at: int = 1) -> None:
        """`wake_at`: so many items wake the reader, or one that is put `at_once`."""
        self._wake_at = wake_at
        self._items: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None  # waits

    def put(self, item: T, *, at_once: bool = True) -> None:
        """Behind what is there. Not `at_once`, it may wait for others; a last item must not."""
        self._items.append(item)
        if self._reader is not None and not self._reader.done() and (at_once or len(self._items) >= self._wake_at):
            self._reader.set_result(None)

    def clear(self) -> None:
        """Drop what is there."""
        self._items.clear()

    async def get(self) -> T:
        """The next item; waits while there is none. Cancelled, it has taken nothing."""
        while not self._items:
            await self._wait()
        return self._items.popleft()

    async def take(self) -> list[T]:
        """Everything that is there, at least one; see `get`."""
        while not self._items:
            await self._wait()
        return self.taken()

    def taken(self) -> list[T]:
        """Everything that is there, which may be nothing; see `take`."""
        items = list(self._items)
        self._items.clear()
        return items

    async def _wait(self) -> None:
        assert self._reader is None, "a mailbox has one reader"
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None
