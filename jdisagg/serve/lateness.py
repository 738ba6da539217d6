"""How late the event loop of this process is, on /metrics: what is due waits so long behind what holds the loop up.

Too few cores, a bug that blocks, or a router with more streams than one process passes on. From 0.6 of `--dead-after-s` on
others doubt that this process lives.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from jdisagg.core.metrics import Metrics

LOOK_S = 0.1  # 10 looks a second cost 0.1 % of a core, and 100 of them are the p99 of ten seconds


async def observe_lateness(metrics: Metrics) -> None:
    """Sleep a while, and observe how much longer that took; until cancelled, on the loop that is watched."""
    while True:
        due_s = monotonic() + LOOK_S
        await asyncio.sleep(LOOK_S)
        metrics.event_loop_late_seconds.observe(max(0.0, monotonic() - due_s))
