"""What else the machine is doing: figures of time mean little without it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

BUSY_SHARE = 0.05  # of one core


def machine(seconds: float = 1.0) -> dict[str, Any]:
    """Cores, load averages, and what takes more than BUSY_SHARE of a core; watches for `seconds`."""
    before = _ticks()
    time.sleep(seconds)
    per_core = os.sysconf("SC_CLK_TCK") * seconds
    shares = {key: (ticks - before.get(key, ticks)) / per_core for key, ticks in _ticks().items()}
    busy = [
        f"{name} {share:.0%}" for (_, name), share in sorted(shares.items(), key=lambda item: -item[1]) if share > BUSY_SHARE
    ]
    return {"cores": len(os.sched_getaffinity(0)), "load": [round(value, 1) for value in os.getloadavg()], "busy": busy}


def _ticks() -> dict[tuple[str, str], int]:
    """CPU ticks by pid and name."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name, _, rest = (path / "stat").read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            found[path.name, name] = int(fields[11]) + int(fields[12])
    return found
