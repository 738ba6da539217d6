"""Heartbeats out and silence in, for one stream.

Silence is counted from the last message on, at wake-ups of our own, each for at most two of its intervals; and one that comes
later than that does not decide. So a process that was stopped, or whose loop was starved for a while, reads its messages before
it declares the other side dead, or quiet: silent for so long that it is worth while to ask somebody else as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

WAKE_UPS_PER_BEAT = 4
MOST_COUNTED = 2  # intervals that one wake-up counts for, however late it comes
QUIET_SHARE = 0.6  # of `dead_after_s`: with the defaults two heartbeats were missed


class Pulse:
    """Beats every `heartbeat_s` while `run` runs; ends when nothing was heard for `dead_after_s`, later on a loop so slow that
    it misses its own wake-ups, or where somebody waits for it."""

    def __init__(
        self,
        *,
        heartbeat_s: float,
        dead_after_s: float,
        on_quiet: Callable[[bool], None] = lambda is_quiet: None,
        waits: Callable[[float], bool] = lambda silent_s: False,
    ) -> None:
        """`on_quiet` hears True after QUIET_SHARE of `dead_after_s` in silence, and False when something comes after that.
        `waits` is asked at each wake-up from `dead_after_s` on, with the seconds of silence: True = not dead yet."""
        self._wake_s = heartbeat_s / WAKE_UPS_PER_BEAT
        self._limit_s = dead_after_s
        self._on_quiet = on_quiet
        self._waits = waits
        self._silent_s = 0.0
        self._counted_s = 0.0  # until when; monotonic
        self.is_quiet = False  # what `on_quiet` was told last

    def heard(self) -> None:
        """Something came from the other side."""
        self._silent_s, self._counted_s = 0.0, monotonic()
        self._tell(False)

    async def run(self, beat: Callable[[], None]) -> None:
        """Call `beat` every interval, by the clock; returns once the other side has been silent for too long."""
        was_late, self._counted_s = False, monotonic()
        beaten_s = self._counted_s
        while (left_s := self._limit_s - self._silent_s) > 0 or self._waits(self._silent_s):
            await asyncio.sleep(min(self._wake_s, left_s) if left_s > 0 else self._wake_s)
            was_late, now_s = self._count(may_decide=was_late), self._counted_s
            if now_s - beaten_s >= (WAKE_UPS_PER_BEAT - 0.5) * self._wake_s:
                beaten_s = now_s
                beat()

    def _count(self, may_decide: bool) -> bool:
        """Count what passed; whether it was more than counts. Two such wake-ups in a row may decide: the loop is just slow."""
        now_s, most_s = monotonic(), MOST_COUNTED * self._wake_s
        passed_s, self._counted_s = now_s - self._counted_s, now_s
        before_s = self._silent_s
        self._silent_s += min(passed_s, most_s)
        if passed_s > most_s and not may_decide:
            self._silent_s = max(before_s, min(self._silent_s, self._limit_s - self._wake_s))
        elif self._silent_s >= QUIET_SHARE * self._limit_s:
            self._tell(True)
        return passed_s > most_s

    def _tell(self, is_quiet: bool) -> None:
        if is_quiet is not self.is_quiet:
            self.is_quiet = is_quiet
            self._on_quiet(is_quiet)
