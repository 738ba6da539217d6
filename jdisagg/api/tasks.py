"""Tasks of an event loop: begun and held, ended and waited for; and calls of other threads into the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any


def start_in(tasks: set[asyncio.Task[None]], coroutine: Coroutine[Any, Any, None]) -> None:
    """Begin it, and hold it in `tasks` until it ends: a loop forgets a task that nobody holds."""
    task = asyncio.create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they are gone; their own errors are dropped, the caller knows why it stops them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: Any) -> None:
    """From any thread: have the loop call it. Nothing where the loop is closed: the process is on its way out."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
