"""Rows of the device-resident decode state, and the evictions the device has not been told of."""

from __future__ import annotations

import heapq


class Slots:
    """Slot ids [0, num_slots); the lowest free one is taken first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._evicted: list[int] = []

    @property
    def num_free(self) -> int:
        """Slots that `take` could give."""
        return len(self._free)

    @property
    def has_evictions(self) -> bool:
        """Some slot was given back since the last `take_evictions`."""
        return bool(self._evicted)

    def take(self) -> int:
        """The lowest free slot; there must be one."""
        return heapq.heappop(self._free)

    def give_back(self, slot: int) -> None:
        """Free a slot; the next plan evicts it before it admits anybody."""
        assert slot not in self._free, f"slot {slot} given back twice"
        heapq.heappush(self._free, slot)
        self._evicted.append(slot)

    def take_evictions(self) -> tuple[int, ...]:
        """Slots given back since the last call, each once."""
        evicted, self._evicted = tuple(sorted(self._evicted)), []
        return evicted
