"""What one stream has to say: messages in order, and a heartbeat when there is nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

M = TypeVar("M")


class Outbox(Generic[M]):
    """A queue that `pump` writes to the stream. On one event loop."""

    def __init__(self, heartbeat: M) -> None:
        self._heartbeat = heartbeat
        self._queue: asyncio.Queue[M | None] = asyncio.Queue()  # None ends it
        self._is_writing = self._is_closed = False

    def __len__(self) -> int:
        """Messages that wait, besides the one that is being written."""
        return self._queue.qsize()

    def put(self, message: M) -> None:
        """Say this next."""
        self._queue.put_nowait(message)

    def beat(self) -> bool:
        """Say a heartbeat, unless something is on its way, or nothing gets away any more; whether it was said."""
        if self._is_closed or self._is_writing or not self._queue.empty():
            return False
        self._queue.put_nowait(self._heartbeat)
        return True

    def close(self) -> None:
        """End after what was put before."""
        self._is_closed = True
        self._queue.put_nowait(None)

    def abandon(self) -> None:
        """End after the message that is being written; drop the others."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self.close()

    async def pump(self, write: Callable[[M], Awaitable[object]]) -> None:
        """Write until closed."""
        while (message := await self._queue.get()) is not None:
            self._is_writing = True
            await write(message)
            self._is_writing = False
