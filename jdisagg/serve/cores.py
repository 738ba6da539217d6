"""How many cores this process may keep busy: those it may run on, at most as many as its container's quota pays for.

The kernel stops all threads of a container that has used up its quota for the rest of every 0.1 s: with a thread for each of 64
cores and a quota of four, that is nearly all the time.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")  # as a container sees its own


def usable_cores(cgroups: Path = CGROUPS) -> int:
    """At least one. A quota of 1.5 cores is two."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(cgroups)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def cpu_quota(cgroups: Path = CGROUPS) -> float | None:
    """Cores that the cgroup (v2, or the cpu controller of v1) pays for; None where it sets no limit, or there is none."""
    with suppress(OSError, ValueError):
        quota, period = (cgroups / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = (int((cgroups / "cpu" / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return None if quota < 0 else quota / period
    return None
