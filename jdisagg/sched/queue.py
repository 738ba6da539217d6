"""Sequences in order of (rank, arrival). Arrivals append; the few out-of-order entries are found by bisection."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice

from jdisagg.sched.sequence import Sequence


class SequenceQueue:
    """Sorted by `Sequence.order`, which is unique. Adding and removing cost a bisection and a memmove of 8 bytes per entry."""

    def __init__(self) -> None:
        self._orders: list[tuple[float, int]] = []
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In order; over a snapshot, so that the loop's body may add and remove."""
        return iter(tuple(self._sequences))

    def at(self, index: int) -> Sequence | None:
        """The sequence at a place in the order, None past the end."""
        return self._sequences[index] if index < len(self._sequences) else None

    def num_before(self, order: tuple[float, int]) -> int:
        """How many have a turn before one of that order."""
        return bisect_left(self._orders, order)

    def head(self, count: int) -> Iterator[Sequence]:
        """The first so many, in order. The queue must not change meanwhile."""
        return islice(self._sequences, count)

    @property
    def last(self) -> Sequence | None:
        """The one whose turn comes last, None when empty."""
        return self._sequences[-1] if self._sequences else None

    def add(self, sequence: Sequence) -> None:
        """Insert at its place."""
        index = bisect_left(self._orders, sequence.order)
        self._orders.insert(index, sequence.order)
        self._sequences.insert(index, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take it out; it must be there."""
        index = bisect_left(self._orders, sequence.order)
        assert self.at(index) is sequence, f"request {sequence.request_id} is not in this queue"
        del self._orders[index], self._sequences[index]
