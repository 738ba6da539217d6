"""When what only waits has to be looked at: a tick must not walk through thousands that wait for a place or an answer.

A heap that forgets lazily: an entry counts as long as it is the soonest of its key. What does not count is cleared away before
it is more than half of the heap. The clock is the caller's.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
MOST_SPARE = 64  # entries that count no more, beside as many as do


class Alarms(Generic[K]):
    """The next time of each key."""

    def __init__(self) -> None:
        self._due_s: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._num_set = 0  # of those for the same time the first one set comes first

    def set(self, key: K, due_s: float) -> None:
        """Not later than that; an earlier time of the same key stays."""
        if due_s >= self._due_s.get(key, inf):
            return
        self._due_s[key] = due_s
        self._num_set += 1
        heappush(self._heap, (due_s, self._num_set, key))
        if len(self._heap) > 2 * len(self._due_s) + MOST_SPARE:
            self._heap = [entry for entry in self._heap if self._due_s.get(entry[2]) == entry[0]]
            heapify(self._heap)

    def drop(self, key: K) -> None:
        """Nothing is awaited for it any more; idempotent."""
        self._due_s.pop(key, None)

    def take_due(self, now_s: float) -> list[K]:
        """Whose time has come, the soonest first; each has to be set anew."""
        due: list[K] = []
        while self._heap and self._heap[0][0] <= now_s:
            due_s, _, key = heappop(self._heap)
            if self._due_s.get(key) == due_s:
                del self._due_s[key]
                due.append(key)
        return due
