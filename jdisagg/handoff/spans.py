"""A set of token positions kept as disjoint half-open ranges [begin, end)."""

from __future__ import annotations

from bisect import bisect_left


class Spans:
    """Sorted, disjoint ranges. Touching ranges stay apart; there are a few hundred at most."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def overlaps(self, begin: int, end: int) -> bool:
        """Whether any position of [begin, end) is in the set."""
        index = bisect_left(self._ranges, (begin, begin))
        before = index > 0 and self._ranges[index - 1][1] > begin
        after = index < len(self._ranges) and self._ranges[index][0] < end
        return begin < end and (before or after)

    def add(self, begin: int, end: int) -> None:
        """Put [begin, end) in. It must be non-empty and new."""
        assert begin < end, f"[{begin}, {end}) is empty"
        assert not self.overlaps(begin, end), f"[{begin}, {end}) overlaps {self._ranges}"
        self._ranges.insert(bisect_left(self._ranges, (begin, end)), (begin, end))

    def remove(self, begin: int, end: int) -> None:
        """Take out exactly the range that was added as [begin, end)."""
        self._ranges.remove((begin, end))

    def reach(self, begin: int) -> int:
        """The end of the unbroken cover that starts at `begin`; `begin` itself when it is not in the set."""
        for low, high in self._ranges:
            if low <= begin < high:
                begin = high
        return begin

    @property
    def num_tokens(self) -> int:
        """Positions in the set."""
        return sum(end - begin for begin, end in self._ranges)


class GroupSpans:
    """The same per KV group: a token is in place when every group has it, and a loss in one group costs the others nothing."""

    def __init__(self, num_groups: int) -> None:
        self._groups = [Spans() for _ in range(num_groups)]

    @property
    def num_groups(self) -> int:
        """Groups of the cache."""
        return len(self._groups)

    def of(self, group: int) -> Spans:
        """One group's positions."""
        return self._groups[group]

    def reach(self, begin: int) -> int:
        """As far as every group covers from `begin` without a gap."""
        return min(spans.reach(begin) for spans in self._groups)
