"""Whose turn it is: requests of a batch are under way beside each other, but for those that may bring a server down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

LONG_S = 20.0  # whose turn is longer is being computed: a router refuses within 5 s without workers, 10 s where all are full


class Turns:
    """Of the requests of one batch. Use from one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: in seconds."""
        self.long_s = 0.0  # time of all turns that were long, as if one behind the other
        self._clock = clock
        self._began_s: list[float] = []  # those under way, the first to begin first
        self._nobody = asyncio.Event()  # is under way
        self._is_one_alone = False
        self._suspect = asyncio.Lock()

    def longest_s(self) -> float:
        """How long the first to begin is under way; 0 = nobody is."""
        return self._clock() - self._began_s[0] if self._began_s else 0.0

    @asynccontextmanager
    async def beside_others(self) -> AsyncIterator[None]:
        """While nobody is alone."""
        while self._is_one_alone:
            await self._nobody.wait()
        with self._under_way():
            yield

    @asynccontextmanager
    async def one_by_one(self) -> AsyncIterator[None]:
        """Likewise, and while no other is that came in so."""
        async with self._suspect, self.beside_others():
            yield

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Once nobody is under way, which nobody is kept from until then; until this one has ended nobody comes in."""
        while self._began_s:
            await self._nobody.wait()
        self._is_one_alone = True
        try:
            with self._under_way():
                yield
        finally:
            self._is_one_alone = False

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        began_s = self._clock()
        self._began_s.append(began_s)
        self._nobody.clear()
        try:
            yield
        finally:
            self._began_s.remove(began_s)
            if (took_s := self._clock() - began_s) > LONG_S:
                self.long_s += took_s
            if not self._began_s:
                self._nobody.set()
