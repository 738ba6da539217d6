"""How a line of the log looks: text, or a JSON object where `JDISAGG_LOG_FORMAT` says so."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

from jdisagg.core.outlet import Outlet
from jdisagg.core.told import printable

FORMAT_VARIABLE = "JDISAGG_LOG_FORMAT"
FORMATS = (TEXT, JSON) = ("text", "json")


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


def _is_json(environ: Mapping[str, str]) -> bool:
    return environ.get(FORMAT_VARIABLE, "").lower() == JSON


def _json_remark(text: str) -> str:
    return json.dumps({"message": text})


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).astimezone().isoformat(timespec="milliseconds")
