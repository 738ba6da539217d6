"""What processes on this machine have open, and which of them a TCP connection belongs to."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_TABLES = ("tcp", "tcp6")


def has_port(pid: int, port: int) -> bool:
    """Whether the process has a socket bound to the local port; False when it is gone."""
    with suppress(OSError):
        return bool(_inodes_at(port, pid) & _inodes_of(pid))
    return False


def _inodes_at(port: int, pid: int) -> set[str]:
    found = set()
    for table in _TABLES:
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found - {"0"}


def _inodes_of(pid: int) -> set[str]:
    return {name[8:-1] for name in descriptors_of(pid) if name.startswith("socket:[")}


def descriptors_of(pid: int) -> list[str]:
    """What the process has open, by name. Raises OSError when it is gone."""
    names = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return names
