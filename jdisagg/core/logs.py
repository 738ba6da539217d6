"""Logging to stderr, one line per record: time, level, role and pid, logger, message. stdout belongs to READY lines."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from jdisagg.core.errors import ConfigError

LEVEL_VARIABLE = "JDISAGG_LOG_LEVEL"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class OneLineFormatter(logging.Formatter):
    """Keeps a record on one line: newlines (of tracebacks too) become a visible ` | `."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        return super().format(record).rstrip().replace("\n", " | ")


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
