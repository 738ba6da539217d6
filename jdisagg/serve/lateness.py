"""How late the event loop of this process is, on /metrics: what is due waits so long behind what holds the loop up.

Too few cores, a bug that blocks, or a router with more streams than one process passes on. From 0.6 of `--dead-after-s` on
others doubt that this process lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import monotonic

from jdisagg.core.metrics import Metrics

LOOK_S = 0.1  # 10 looks a second cost 0.1 % of a core, and 100 of them are the p99 of ten seconds
MOST_MISSED = 300  # looks of one stall


async def observe_lateness(metrics: Metrics) -> None:
    """Sleep a while, and observe how much longer that took, for each look that was due meanwhile; until cancelled, on the loop
    that is watched."""
    while True:
        due_s = monotonic() + LOOK_S
        await asyncio.sleep(LOOK_S)
        for late_s in waits_s(monotonic() - due_s):
            metrics.event_loop_late_seconds.observe(late_s)


def waits_s(late_s: float) -> Iterator[float]:
    """Of all that is due in a stall, not of the first look alone: one that stands still for 2 s in every 20 is late in a tenth
    of the time, and would show it in 0.6 % of its looks."""
    for num_missed in range(MOST_MISSED):
        if num_missed and num_missed * LOOK_S > late_s:
            return
        yield max(0.0, late_s - num_missed * LOOK_S)
