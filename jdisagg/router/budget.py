"""How many replays a router may start: a fleet that dies over and over must fail clearly, not compute everything many times.

A bucket that fills with replays and leaks. It holds everything that is alive once, plus a floor, so one death never fails for
lack of budget; it leaks its own size per minute, and a share of every new request.
"""

from __future__ import annotations

WINDOW_S = 60.0


class ReplayBudget:
    """Time is passed in."""

    def __init__(self, share: float, floor: int) -> None:
        """`share`: replays per new request. `floor`: replays a minute whatever the traffic."""
        self._share = share
        self._floor = floor
        self._spent = 0.0
        self._leaked_s = 0.0

    def admitted(self) -> None:
        """A new request came."""
        self._spent = max(0.0, self._spent - self._share)

    def take(self, num_live: int, now_s: float) -> bool:
        """Whether one more replay may start now, with `num_live` requests alive."""
        size = self._floor + num_live
        self._spent = max(0.0, self._spent - max(0.0, now_s - self._leaked_s) * size / WINDOW_S)
        self._leaked_s = max(self._leaked_s, now_s)
        if self._spent + 1.0 > size:
            return False
        self._spent += 1.0
        return True
