"""The READY line: one JSON object on stdout when a process serves. stdout carries nothing else."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict, dataclass, field, fields
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """What a process says of itself. Addresses are HOST:PORT as bound, None where it has no such edge."""

    role: str
    http: str | None
    grpc: str | None
    model: str
    warmup_s: float = 0.0  # from start to READY
    executables: int = 0  # compiled programs
    bits: str | None = None  # that an `exact` engine computes, see `jdisagg.engine.bits`
    pid: int = field(default_factory=os.getpid)
    workers: tuple[dict[str, Any], ...] = ()  # of a supervisor: its children's lines

    def line(self) -> str:
        """The JSON text, without newline."""
        return json.dumps(
            {"event": "ready", **{name: value for name, value in asdict(self).items() if value not in (None, ())}}
        )


def announce(ready: Ready) -> None:
    """Print the line, at once. Whoever was to read it may have gone; the process serves all the same."""
    try:
        sys.stdout.write(ready.line() + "\n")
        sys.stdout.flush()
    except OSError as error:
        log.warning("READY could not be said on stdout: %s", error.strerror)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in its buffer would be tried at exit


def parse(line: str) -> Ready | None:
    """The Ready in a line of a child's stdout, or None when the line is something else."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    if not isinstance(message, dict) or message.get("event") != "ready":
        return None
    said: dict[str, Any] = {"role": "", "http": None, "grpc": None, "model": "", "pid": 0}
    said |= {one.name: message[one.name] for one in fields(Ready) if one.name in message}
    said["workers"] = tuple(said.get("workers", ()))
    return Ready(**said)
