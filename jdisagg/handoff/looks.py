"""Time in which an engine stood still: stopped, paused with its machine, or starved. It blames nobody for that."""

from __future__ import annotations

from collections import deque

RECENT_LOOKS = 8
STOOD_STILL_S = 1.0  # between two looks of an engine that looks twenty times a second, or after every step


class Looks:
    """When an engine looked last, and for how long it stood still since: what others said meanwhile may be on its way still."""

    def __init__(self) -> None:
        self._looked_s: float | None = None
        self._recent_s: deque[float] = deque(maxlen=RECENT_LOOKS)

    def stood_still_s(self, now_s: float) -> float:
        """To be asked at every look. Long steps are no standstill: who needs seconds for each looks as late always."""
        passed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        is_still = passed_s >= max(STOOD_STILL_S, 2 * max(self._recent_s, default=0.0))
        self._looked_s = now_s
        self._recent_s.append(passed_s)
        return passed_s if is_still else 0.0
