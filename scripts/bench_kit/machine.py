"""Where and of what the figures of a run are."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NICE = -15
BUSY_SHARE = 0.05  # of one core


def machine() -> dict[str, Any]:
    """Processor, cores, load, Python, commit and date, by name."""
    info = Path("/proc/cpuinfo")
    models = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.is_file() else []
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def load(seconds: float = 1.0) -> dict[str, Any]:
    """Cores, load averages, and what takes more than BUSY_SHARE of a core: figures of time mean little without it. Watches for
    `seconds`."""
    before = _ticks()
    time.sleep(seconds)
    per_core = os.sysconf("SC_CLK_TCK") * seconds
    shares = {key: (ticks - before.get(key, ticks)) / per_core for key, ticks in _ticks().items()}
    busy = [
        f"{name} {share:.0%}" for (_, name), share in sorted(shares.items(), key=lambda item: -item[1]) if share > BUSY_SHARE
    ]
    return {"cores": len(os.sched_getaffinity(0)), "load": [round(value, 1) for value in os.getloadavg()], "busy": busy}


def cpu_ticks(pid: int | str) -> tuple[str, int]:
    """The name of a process, and the CPU ticks of all its threads so far. Raises OSError when it is gone."""
    name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, int(fields[11]) + int(fields[12])


def _ticks() -> dict[tuple[str, str], int]:
    """By pid and name."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name, ticks = cpu_ticks(path.name)
            found[path.name, name] = ticks
    return found


def go_first() -> bool:
    """Run this process's threads before others that share their core, as far as the system allows: what measures must not
    wait for what is measured. Returns whether it did. For after the servers' start, which would inherit it."""
    try:
        for thread in Path("/proc/self/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), NICE)
    except OSError:  # not permitted, or no such directory
        return False
    return True


def one_line(found: dict[str, Any]) -> str:
    """Of names and values."""
    return "  ".join(f"{name}: {value}" for name, value in found.items())


def commit() -> str:
    """Of the working tree; "unknown" outside a repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git there
        return "unknown"
    return done.stdout.strip() or "unknown"
