"""Logging to stderr, one line per record: time, level, role and pid, logger, message; text, or a JSON object.

stdout belongs to READY lines.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from time import monotonic
from typing import TextIO

from jdisagg.core.errors import ConfigError
from jdisagg.core.outlet import Outlet
from jdisagg.core.told import printable, told

log = logging.getLogger(__name__)

GRPC_SERVER_LOG = "grpc._cython.cygrpc"
HTTP_SERVER_LOG = "uvicorn.error"
NO_HTTP = "Invalid HTTP request received."  # uvicorn's words; whoever refuses it tells of that
HTTP_BUG = "Exception in ASGI application\n"  # likewise, of what ended a call, with its stack
GARBLED_EVERY_S = 10.0
BUG_EVERY_S, BUG_FIRST = 10.0, 16  # stacks of kilobytes: a bug may end every call
NO_TEXT = "Invalid encoding on %s"  # gRPC's, of the status of a call; whoever called tells of that
LEVEL_VARIABLE = "JDISAGG_LOG_LEVEL"
FORMAT_VARIABLE = "JDISAGG_LOG_FORMAT"
FORMATS = (TEXT, JSON) = ("text", "json")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def setup_logs(role: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send all logging of this process to stderr, from the level of `JDISAGG_LOG_LEVEL` on (default info), in the format of
    `JDISAGG_LOG_FORMAT` (default text).

    Replaces handlers set before. Raises ConfigError when a variable holds nothing that is known.
    """
    level = _LEVELS[_choice(environ, LEVEL_VARIABLE, _LEVELS, "info")]
    _choice(environ, FORMAT_VARIABLE, FORMATS, TEXT)
    handler = PatientHandler(to_stderr(environ))
    handler.setFormatter(make_formatter(role, environ))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger(GRPC_SERVER_LOG).addFilter(Garbled())
    logging.getLogger(HTTP_SERVER_LOG).addFilter(Garbled())
    logging.getLogger(HTTP_SERVER_LOG).addFilter(HttpBugs())
    logging.captureWarnings(True)
    for noisy in ("jax", "absl", "orbax", "httpx", "uvicorn", "asyncio"):
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))


def make_formatter(role: str, environ: Mapping[str, str] = os.environ) -> logging.Formatter:
    """Of records of this process."""
    if _is_json(environ):
        return JsonFormatter(role)
    return OneLineFormatter(f"%(asctime)s %(levelname).1s {role}[{os.getpid()}] %(name)s: %(message)s")


def to_stderr(environ: Mapping[str, str] = os.environ) -> Outlet:
    """For lines of the format that is set."""
    return Outlet(sys.stderr, remark=_json_remark) if _is_json(environ) else Outlet(sys.stderr)


def passed_on(name: str, line: str, environ: Mapping[str, str] = os.environ) -> str:
    """What the child process `name` wrote to stderr, as a line of ours. It need not be a record: libraries write there, too."""
    if not _is_json(environ):
        return f"{name} | {line}"
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    return json.dumps({"process": name, **(fields if isinstance(fields, dict) else {"message": line})})


class PatientHandler(logging.StreamHandler[TextIO]):
    """To stderr, of which nobody may be reading."""

    def __init__(self, outlet: Outlet) -> None:
        super().__init__(sys.stderr)
        self._outlet = outlet

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        try:
            self._outlet.write(self.format(record) + self.terminator)
        except Exception as error:  # noqa: BLE001 - as StreamHandler does: whatever a record holds, whoever logs goes on
            if not isinstance(error, OSError):  # else there is nobody to tell
                self._tell(record, error)

    def _tell(self, record: logging.LogRecord, error: Exception) -> None:
        """One line in its place: `handleError` writes many, and waits for whoever reads them."""
        text = "this line cannot be formatted (%s:%d)"
        exc_info = type(error), error, error.__traceback__
        told = logging.LogRecord(record.name, record.levelno, "", 0, text, (record.pathname, record.lineno), exc_info)
        with suppress(OSError, ValueError):  # a stream that is closed
            self._outlet.write(self.format(told) + self.terminator)


class OneLineFormatter(logging.Formatter):
    """Keeps a record on one line: newlines (of tracebacks too) become a visible ` | `, other control characters escapes."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        return printable(super().format(record).rstrip().replace("\n", " | "))

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """To the millisecond, of this machine's zone, which is named: logs of several machines can be laid side by side."""
        return _time(record)


class JsonFormatter(logging.Formatter):
    """A record as a JSON object on one line; a traceback is its `exception`."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        fields = {"time": _time(record), "level": record.levelname.lower(), "role": self._role, "pid": os.getpid()}
        fields |= {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class Garbled(logging.Filter):
    """Bytes that are no message, or no text, as in what gRPC says of a connection for which there was no descriptor: it tells
    of each with a stack, uvicorn in one line that names nobody, and there may be any number of them."""

    def __init__(self) -> None:
        super().__init__()
        self._seldom = Seldom(every_s=GARBLED_EVERY_S)

    def filter(self, record: logging.LogRecord) -> bool:
        """False for such a record; now and then a line is said in the place of gRPC's."""
        kind = record.exc_info[0] if record.exc_info else None
        if record.name == HTTP_SERVER_LOG and record.msg == NO_HTTP:
            return False
        text = "a message that cannot be read was refused: %s"
        if record.msg == NO_TEXT:
            text = "the status of a call is no text: %s"
        elif kind is None or kind.__name__ != "DecodeError":
            return True
        self._seldom.say(log, logging.WARNING, text, told(record.getMessage()), now_s=monotonic())
        return False


class HttpBugs(logging.Filter):
    """The stacks of calls over HTTP that bugs end: of many, the first few."""

    def __init__(self) -> None:
        super().__init__()
        self._seldom = Seldom(BUG_EVERY_S, BUG_FIRST)

    def filter(self, record: logging.LogRecord) -> bool:
        """False for such a record; a line is said in its place, or it is counted."""
        if record.msg != HTTP_BUG or not record.exc_info:
            return True
        self._seldom.say(log, logging.ERROR, "a call over HTTP failed", now_s=monotonic(), error=record.exc_info[1])
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

    def say(
        self, log: logging.Logger, level: int, text: str, *told: object, now_s: float, error: BaseException | None = None
    ) -> None:
        """Log it, with the stack of `error`, and how many were kept back since the last one; or keep it back."""
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
        log.log(level, text, *told, exc_info=error)


def _choice(environ: Mapping[str, str], variable: str, choices: Collection[str], default: str) -> str:
    value = environ.get(variable, default).lower()
    if value not in choices:
        raise ConfigError(f"{variable}: got {value!r}, wanted one of {', '.join(choices)}")
    return value


def _is_json(environ: Mapping[str, str]) -> bool:
    return environ.get(FORMAT_VARIABLE, "").lower() == JSON


def _json_remark(text: str) -> str:
    return json.dumps({"message": text})


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).astimezone().isoformat(timespec="milliseconds")
