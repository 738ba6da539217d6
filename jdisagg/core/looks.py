"""Time in which this process stood still: stopped, paused with its machine, or starved. It blames nobody for that."""

from __future__ import annotations

from collections import deque

RECENT_LOOKS = 8
STOOD_STILL_S = 1.0  # between two looks of somebody who looks several times a second, or after every step


class Looks:
    """When somebody looked last, and for how long this process stood still since: what others said meanwhile may be on its way
    still. Time is passed in."""

    def __init__(self, shortest_s: float = STOOD_STILL_S, *, num_recent: int = RECENT_LOOKS) -> None:
        """`shortest_s`: what takes less is no standstill. `num_recent`: so many looks tell how long steps take; 0: there are
        none, as somebody looks by a timer."""
        self._shortest_s = shortest_s
        self._recent_s: deque[float] = deque(maxlen=num_recent)
        self._looked_s: float | None = None
        self._began_s = 0.0  # with the first look; so much later as it stood still since

    def stood_still_s(self, now_s: float) -> float:
        """To be asked at every look. Long steps are no standstill: who needs seconds for each looks as late always."""
        if self._looked_s is None:
            self._looked_s = self._began_s = now_s
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        is_still = passed_s >= max(self._shortest_s, 2 * max(self._recent_s, default=0.0))
        self._recent_s.append(passed_s)
        still_s = passed_s if is_still else 0.0
        self._began_s += still_s
        return still_s

    def awake_s(self, now_s: float) -> float:
        """A look, too. The time since the first one, by a clock that stands still while this process does."""
        self.stood_still_s(now_s)
        return now_s - self._began_s
