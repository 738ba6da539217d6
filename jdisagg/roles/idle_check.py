"""When an idle engine checks its scheduler's invariants: the cost grows with the pool, and a request that comes then waits."""

from __future__ import annotations

CALM_S = 1.0  # of idleness before it: in a lull of a busy engine somebody comes soon (40 to 200 ms with 262,144 pages)
EVERY_S = 60.0  # at most


class IdleCheck:
    """Once per idle spell that lasts long enough. Deterministic: the clock is the caller's."""

    def __init__(self) -> None:
        self._idle_since_s: float | None = None
        self._checked_s: float | None = None
        self._is_owed = False  # something has happened since

    def is_due(self, now_s: float, *, is_idle: bool) -> bool:
        """Ask once per tick; True when the invariants are to be checked now."""
        if not is_idle:
            self._idle_since_s, self._is_owed = None, True
            return False
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        rested = self._checked_s is None or now_s - self._checked_s >= EVERY_S
        if not self._is_owed or not rested or now_s - self._idle_since_s < CALM_S:
            return False
        self._checked_s, self._is_owed = now_s, False
        return True
