"""Where and of what the figures of a run are."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NICE = -15


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
