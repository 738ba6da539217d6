"""Heartbeats out and silence in, for one stream.

Silence is counted at wake-ups of our own, each for at most two of its intervals: a process that was stopped, or whose loop was
starved for a while, finds its unread messages before it has counted enough to declare the other side dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

WAKE_UPS_PER_BEAT = 4  # silence is noticed at most this fraction of a beat late: 62 ms at 250 ms

MOST_COUNTED = 2  # intervals that one wake-up counts for, however late it comes


class Pulse:
    """Beats every `heartbeat_s` while `run` runs; ends when nothing was heard for about `dead_after_s`."""

    def __init__(self, *, heartbeat_s: float, dead_after_s: float) -> None:
        self._wake_s = heartbeat_s / WAKE_UPS_PER_BEAT
        self._limit_s = dead_after_s + self._wake_s  # the first wake-up may follow a message at once
        self._silent_s = 0.0

    def heard(self) -> None:
        """Something came from the other side."""
        self._silent_s = 0.0

    async def run(self, beat: Callable[[], None]) -> None:
        """Call `beat` every interval; returns once the other side has been silent for too long."""
        wake_ups, last_s = 0, monotonic()
        while self._silent_s < self._limit_s:
            await asyncio.sleep(self._wake_s)
            now_s = monotonic()
            self._silent_s += min(now_s - last_s, MOST_COUNTED * self._wake_s)
            last_s = now_s
            wake_ups += 1
            if wake_ups % WAKE_UPS_PER_BEAT == 0:
                beat()


async def cancel_and_wait(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks and wait until they are gone; their own errors are dropped, the caller knows why it stops them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
