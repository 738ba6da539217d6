"""What takes a tokenizer or a chat template long, beside the event loop: two at a time, and only so much waits.

In the threads that everybody shares, sixteen texts of a million characters would hold up each other's short work for half a
minute; more than two only take turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from jdisagg.api.tasks import threads_beside
from jdisagg.core.errors import Overloaded, Unavailable

INLINE_CHARACTERS = 16_384  # or tokens, of all texts of a request; more are long
THREADS = 2
MAX_WAITING_CHARACTERS = 2**23  # of all requests; some ten seconds of the slowest text, two of English
_RETRY_AFTER_S = 5.0

T = TypeVar("T")


class Run(Protocol):
    """`await run(function)` is what `function()` returns."""

    async def __call__(self, function: Callable[[], T], /) -> T: ...


class LongTexts:
    """Use from one event loop. The threads end with the last reference to it."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None  # until there is a long one
        self._num_requests = self._num_characters = 0

    @asynccontextmanager
    async def place(self, num_characters: int) -> AsyncIterator[Run]:
        """For the texts of one request, `num_characters` together: `run` takes one after the other, by turns with other
        requests; at once and here, when they are not long. Raises Overloaded when too much waits already, and `run` Unavailable
        where no thread is left. A text that is begun is finished, also when nobody wants it any more, so that cancelled
        requests take no more than the threads there are."""
        if num_characters <= INLINE_CHARACTERS:
            yield _at_once
            return
        if self._num_characters >= MAX_WAITING_CHARACTERS:
            waits = f"{self._num_requests} requests of {self._num_characters} characters together wait for the tokenizer"
            raise Overloaded(f"{waits}; come again", retry_after_s=_RETRY_AFTER_S)
        self._num_requests += 1
        self._num_characters += num_characters
        try:
            yield self._beside
        finally:
            self._num_requests -= 1
            self._num_characters -= num_characters

    async def _beside(self, function: Callable[[], T]) -> T:
        if self._executor is None:
            try:
                self._executor = threads_beside(THREADS, "long-texts")
            except RuntimeError as error:
                raise Unavailable(f"no thread is left to read a long text: {error}; send the request again") from error
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)


async def _at_once(function: Callable[[], T]) -> T:
    return function()
