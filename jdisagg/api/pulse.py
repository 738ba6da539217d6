"""Heartbeats out and silence in, for one stream.

Silence is counted in wake-ups of our own, not in clock time: a process that was stopped, or whose loop was starved for a
while, finds its unread messages before it has counted enough of them to declare the other side dead.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

WAKE_UPS_PER_BEAT = 4  # silence is noticed at most this fraction of a beat late: 62 ms at 250 ms


class Pulse:
    """Beats every `heartbeat_s` while `run` runs; ends when nothing was heard for about `dead_after_s`."""

    def __init__(self, *, heartbeat_s: float, dead_after_s: float) -> None:
        self._wake_s = heartbeat_s / WAKE_UPS_PER_BEAT
        self._limit = math.ceil(dead_after_s / self._wake_s) + 1  # the first wake-up may follow a message at once
        self._silent = 0

    def heard(self) -> None:
        """Something came from the other side."""
        self._silent = 0

    async def run(self, beat: Callable[[], None]) -> None:
        """Call `beat` every interval; returns once the other side has been silent for too long."""
        wake_ups = 0
        while self._silent < self._limit:
            await asyncio.sleep(self._wake_s)
            self._silent += 1
            wake_ups += 1
            if wake_ups % WAKE_UPS_PER_BEAT == 0:
                beat()


async def cancel_and_wait(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks and wait until they are gone; their own errors are dropped, the caller knows why it stops them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
