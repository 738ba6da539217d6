"""Logging to stderr, one line per record: time, level, role and pid, logger, message. stdout belongs to READY lines."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping
from time import monotonic
from typing import TextIO

from jdisagg.core.errors import ConfigError
from jdisagg.core.outlet import Outlet
from jdisagg.core.told import printable

log = logging.getLogger(__name__)

GRPC_SERVER_LOG = "grpc._cython.cygrpc"
HTTP_SERVER_LOG = "uvicorn.error"
NO_HTTP = "Invalid HTTP request received."  # uvicorn's words, of whoever sent it nothing more is known
GARBLED_EVERY_S = 10.0
LEVEL_VARIABLE = "JDISAGG_LOG_LEVEL"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class OneLineFormatter(logging.Formatter):
    """Keeps a record on one line: newlines (of tracebacks too) become a visible ` | `, other control characters escapes."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        return printable(super().format(record).rstrip().replace("\n", " | "))


class PatientHandler(logging.StreamHandler[TextIO]):
    """To stderr, of which nobody may be reading."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._outlet = Outlet(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        try:
            self._outlet.write(self.format(record) + self.terminator)
        except Exception:  # noqa: BLE001 - as StreamHandler does: whatever a record holds, whoever logs goes on
            self.handleError(record)


def setup_logs(role: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send all logging of this process to stderr at the level of `JDISAGG_LOG_LEVEL` (default info).

    Replaces handlers set before. Raises ConfigError when the variable holds no level.
    """
    value = environ.get(LEVEL_VARIABLE, "info").lower()
    if value not in _LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE}: got {value!r}, wanted one of {', '.join(_LEVELS)}", field=LEVEL_VARIABLE)
    handler = PatientHandler()
    handler.setFormatter(
        OneLineFormatter(f"%(asctime)s.%(msecs)03d %(levelname).1s {role}[{os.getpid()}] %(name)s: %(message)s", "%H:%M:%S")
    )
    logging.basicConfig(level=_LEVELS[value], handlers=[handler], force=True)
    logging.getLogger(GRPC_SERVER_LOG).addFilter(Garbled())
    logging.getLogger(HTTP_SERVER_LOG).addFilter(Garbled())
    logging.captureWarnings(True)
    for noisy in ("jax", "absl", "orbax", "httpx", "uvicorn", "asyncio"):
        logging.getLogger(noisy).setLevel(max(_LEVELS[value], logging.WARNING))


class Garbled(logging.Filter):
    """Bytes that are no message: gRPC tells of each with a stack, uvicorn in one line, and whoever reaches a port can send any
    number of them."""

    def __init__(self) -> None:
        super().__init__()
        self._seldom = Seldom(every_s=GARBLED_EVERY_S)

    def filter(self, record: logging.LogRecord) -> bool:
        """False for such a record; now and then a line is said in its place."""
        kind = record.exc_info[0] if record.exc_info else None
        if record.name == HTTP_SERVER_LOG and record.msg == NO_HTTP:
            text = "what came on --port is no HTTP, and was refused; gRPC, that of workers too, goes to --grpc-port"
            self._seldom.say(log, logging.WARNING, text, now_s=monotonic())
            return False
        if kind is None or kind.__name__ != "DecodeError":
            return True
        text = "a message that cannot be read was refused: %s"
        self._seldom.say(log, logging.WARNING, text, record.getMessage(), now_s=monotonic())
        return False


class Seldom:
    """Of lines that anybody on the network can cause at will: one in `every_s` seconds is said, or the first few, the others
    are counted. Any thread."""

    def __init__(self, every_s: float, first: int = 1) -> None:
        """`first`: so many, the first ones of every `every_s` seconds, are said."""
        self._every_s = every_s
        self._first = first
        self._next_s = 0.0
        self._num_said = 0
        self._num_kept_back = 0
        self._lock = threading.Lock()

    def say(self, log: logging.Logger, level: int, text: str, *told: object, now_s: float) -> None:
        """Log it, and how many were kept back since the last one; or keep it back."""
        with self._lock:
            if now_s >= self._next_s:
                self._next_s, self._num_said = now_s + self._every_s, 0
            if self._num_said >= self._first:
                self._num_kept_back += 1
                return
            self._num_said += 1
            kept_back, self._num_kept_back = self._num_kept_back, 0
        if kept_back:
            text, told = f"{text}; %d more since it was last said", (*told, kept_back)
        log.log(level, text, *told)
