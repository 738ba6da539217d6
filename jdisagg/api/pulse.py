"""Heartbeats out and silence in, for one stream.

Silence is counted in beats of our own, not in clock time: a process that was stopped, or whose loop was starved for a while,
finds its unread messages before it has counted enough beats to declare the other side dead.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Pulse:
    """Beats every `heartbeat_s` while `run` runs; ends when nothing was heard for about `dead_after_s`."""

    def __init__(self, *, heartbeat_s: float, dead_after_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._limit_beats = math.ceil(dead_after_s / heartbeat_s) + 1  # the first beat may follow a message at once
        self._silent_beats = 0

    def heard(self) -> None:
        """Something came from the other side."""
        self._silent_beats = 0

    async def run(self, beat: Callable[[], None]) -> None:
        """Call `beat` every interval; returns once the other side has been silent for too long."""
        while self._silent_beats < self._limit_beats:
            await asyncio.sleep(self._heartbeat_s)
            self._silent_beats += 1
            beat()


async def cancel_and_wait(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks and wait until they are gone; their own errors are dropped, the caller knows why it stops them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
