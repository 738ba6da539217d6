"""Logging to stderr, one line per record: time, level, role and pid, logger, message. stdout belongs to READY lines."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping

from jdisagg.core.errors import ConfigError
from jdisagg.core.told import printable

LEVEL_VARIABLE = "JDISAGG_LOG_LEVEL"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class OneLineFormatter(logging.Formatter):
    """Keeps a record on one line: newlines (of tracebacks too) become a visible ` | `, other control characters escapes."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        return printable(super().format(record).rstrip().replace("\n", " | "))


def setup_logs(role: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send all logging of this process to stderr at the level of `JDISAGG_LOG_LEVEL` (default info).

    Replaces handlers set before. Raises ConfigError when the variable holds no level.
    """
    value = environ.get(LEVEL_VARIABLE, "info").lower()
    if value not in _LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE}: got {value!r}, wanted one of {', '.join(_LEVELS)}", field=LEVEL_VARIABLE)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        OneLineFormatter(f"%(asctime)s.%(msecs)03d %(levelname).1s {role}[{os.getpid()}] %(name)s: %(message)s", "%H:%M:%S")
    )
    logging.basicConfig(level=_LEVELS[value], handlers=[handler], force=True)
    logging.captureWarnings(True)
    for noisy in ("jax", "absl", "orbax", "httpx", "uvicorn", "asyncio"):
        logging.getLogger(noisy).setLevel(max(_LEVELS[value], logging.WARNING))


class Seldom:
    """Of lines that anybody on the network can cause at will: one in `every_s` seconds is said, the others are counted. Any
    thread."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next_s = 0.0
        self._num_kept_back = 0
        self._lock = threading.Lock()

    def say(self, log: logging.Logger, level: int, text: str, *told: object, now_s: float) -> None:
        """Log it, and how many were kept back since the last one; or keep it back."""
        with self._lock:
            if now_s < self._next_s:
                self._num_kept_back += 1
                return
            self._next_s, kept_back, self._num_kept_back = now_s + self._every_s, self._num_kept_back, 0
        if kept_back:
            text, told = f"{text}; %d more since it was last said", (*told, kept_back)
        log.log(level, text, *told)
