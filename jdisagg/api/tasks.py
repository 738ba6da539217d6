"""Tasks of an event loop: begun and held, ended and waited for; threads beside it, and calls of threads into it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier
from typing import Any, TypeVar

M = TypeVar("M")

ONCE_MORE_S = 0.2
AFTER_BUG_S = 1.0  # what failed in this process fails again: the log says so once a second


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


async def until_set(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until it is, or so long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


async def first_of(*tasks: asyncio.Future[Any], timeout_s: float) -> None:
    """Wait until one of them is done, or so long, and then once more for a moment: a loop that stood still looks at its clock
    before it reads what came."""
    for wait_s in (timeout_s, ONCE_MORE_S):
        await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)


async def first_message(messages: AsyncIterator[M], empty: M, timeout_s: float) -> M | None:
    """The first of a stream, `empty` when it ends without one, None when it says nothing for so long."""
    first = asyncio.ensure_future(anext(messages, empty))
    try:
        await first_of(first, timeout_s=timeout_s)
        return first.result() if first.done() else None
    finally:
        first.cancel()


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: Any) -> None:
    """From any thread: have the loop call it. Nothing where the loop is closed: the process is on its way out."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)


def threads_beside(number: int, name: str) -> ThreadPoolExecutor:
    """An executor whose threads are all there when this returns. By itself it starts one when there is work: where the machine
    has none left by then, what was to be done fails, and with a long output of one request the stream of all of a worker's.
    Raises RuntimeError where none is left now."""
    executor, all_there = ThreadPoolExecutor(number, thread_name_prefix=name), Barrier(number + 1)
    try:
        for _ in range(number):
            executor.submit(all_there.wait)
    except RuntimeError:
        all_there.abort()
        raise
    all_there.wait()
    return executor
