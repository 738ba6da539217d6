"""The latest batches of one engine's cache events, and the set of pages they add up to.

    engine thread: post(batch) -> event loop: ring + set -> any number of listeners, each with a position of its own

Listeners have no queues: one that is too slow finds that the ring has moved past its position, and takes a snapshot. So the
engine never waits, and memory is bounded by the ring and the pool, however many listen.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from jdisagg.api.tasks import call_on
from jdisagg.kv.events import Batch, CachedPage, CachedPages


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All pages as of batch `sequence` (0: none was published yet). Two lists: pairs take several times as long to copy."""

    sequence: int
    time_s: float
    keys: list[bytes]
    pages: list[CachedPage]  # in the order of `keys`


class KVEventRing:
    """One engine's pool. Everything but `post` belongs to the event loop."""

    def __init__(self, *, pool: str, epoch: str, page_size: int, num_batches: int, loop: asyncio.AbstractEventLoop) -> None:
        self.pool = pool
        self.epoch = epoch
        self.page_size = page_size
        self._loop = loop
        self._batches: deque[Batch] = deque(maxlen=num_batches)
        self._set = CachedPages(page_size)
        self._sequence = 0  # of the latest batch
        self._time_s = 0.0
        self._news = asyncio.Event()

    def post(self, batch: Batch) -> None:
        """Engine thread: hand a batch over. What waits here while the loop is busy is bounded by the requests that run."""
        call_on(self._loop, self.append, batch)

    def append(self, batch: Batch) -> None:
        """Take the next batch and wake everybody who waits for it."""
        assert batch.sequence == self._sequence + 1, f"batch {batch.sequence} after {self._sequence}"
        self._set.apply(batch.events)
        self._batches.append(batch)
        self._sequence, self._time_s = batch.sequence, batch.time_s
        self._news.set()
        self._news = asyncio.Event()

    def has(self, sequence: int) -> bool:
        """Batches from `sequence` on can be read, or `sequence` is the next to come."""
        return self._sequence - len(self._batches) < sequence <= self._sequence + 1

    async def read(self, sequence: int) -> list[Batch]:
        """All kept batches from `sequence` on, which `has` must allow; waits for the first."""
        assert self.has(sequence), f"batch {sequence} is not kept"
        while self._sequence < sequence:
            await self._news.wait()
        if not self.has(sequence):  # woken late
            return []
        behind = self._sequence + 1 - sequence
        return [self._batches[i] for i in range(len(self._batches) - behind, len(self._batches))]

    def snapshot(self) -> Snapshot:
        """The set now."""
        return Snapshot(self._sequence, self._time_s, list(self._set.pages), list(self._set.pages.values()))
