"""How late the event loop of this process is, on /metrics: what is due waits so long behind what holds the loop up.

Too few cores, a bug that blocks, or a router with more streams than one process passes on. From 0.6 of `--dead-after-s` on
others doubt that this process lives.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from jdisagg.api.pulse import cancel_and_wait
from jdisagg.core.metrics import Metrics

LOOK_S = 0.1  # 10 looks a second cost 0.1 % of a core, and 100 of them are the p99 of ten seconds


class Lateness:
    """A task that sleeps a while and observes how much longer that took. Lives on the loop it watches."""

    def __init__(self, metrics: Metrics) -> None:
        self._late_seconds = metrics.event_loop_late_seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From now on."""
        self._task = asyncio.create_task(self._look())

    async def close(self) -> None:
        """End the task; idempotent."""
        if self._task is not None:
            await cancel_and_wait(self._task)

    async def _look(self) -> None:
        while True:
            due_s = monotonic() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self._late_seconds.observe(max(0.0, monotonic() - due_s))
