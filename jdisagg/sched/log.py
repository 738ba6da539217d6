"""The schedule log: every call to a scheduler and its result, one JSON line each; the last plans, always; and why one waits.

    {"call": "__init__", "args": [config], "kwargs": {sizes}}
    {"call": "add", "args": [request, now_s], "kwargs": {}, "result": null}
    {"call": "schedule", "args": [now_s], "kwargs": {}, "result": plan}
    {"call": "release", "args": [request_id], "kwargs": {}, "at_s": 12.5, "result": null}

A call that is not given the time has "at_s", by the same clock. One that raised has "raised": type name instead of "result".
`jdisagg.replay` runs such a log again. The last plans are written to a file when an assertion fails (`flight_recorder`).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, TextIO

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.errors import ConfigError, RequestError
from jdisagg.core.requests import EngineRequest, Output, Role
from jdisagg.sched.explain import Cause, Explainer, Wait
from jdisagg.sched.flight_recorder import FlightRecorder
from jdisagg.sched.log_codec import encode
from jdisagg.sched.plan import Plan, StepResult
from jdisagg.sched.scheduler import Scheduler
from jdisagg.sched.table import SequenceTable
from jdisagg.sched.views import Reserved

_log = logging.getLogger(__name__)

CALLS_WITH_TIME = frozenset({"add", "expire", "schedule", "commit", "remote_first_token", "kv_arrived"})  # their last argument


def make_scheduler(config: SchedulerConfig, *, role: Role, **sizes: Any) -> Scheduler:
    """The scheduler of a worker: recorded when `config.schedule_log` names a file. `sizes` are Scheduler's other arguments.

    When an assertion fails its last plans go to the log's directory, else to the one for temporary files.
    """
    directory = Path(tempfile.gettempdir()) if config.schedule_log is None else Path(config.schedule_log).parent
    return LoggedScheduler(config, role=role, plans_directory=directory, **sizes)


class LoggedScheduler(Scheduler):
    """A Scheduler that writes down its calls. Inherits because roles name the concrete type and must not notice."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        role: Role,
        plans_directory: Path | None = None,
        clock: Callable[[], float] = monotonic,
        **sizes: Any,
    ) -> None:
        """`clock` is the one by which callers say `now_s`. Raises ConfigError like Scheduler, and for a log file that another
        process writes; OSError when it cannot be written."""
        super().__init__(config, role=role, **sizes)
        self.recorder = FlightRecorder(plans_directory, role.value)
        self._file: TextIO | None = None
        self._clock = clock
        if config.schedule_log is not None:
            self._file = _take_over(Path(config.schedule_log))
            self._write({"call": "__init__", "args": encode([config]), "kwargs": _plain({"role": role, **sizes})})

    def close_log(self) -> None:
        """End the log file; idempotent. Calls after this are not written."""
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):  # part of a line that a full disk did not take
                file.close()

    def add(self, request: EngineRequest, now_s: float, **options: Any) -> None:
        """As Scheduler.add."""
        self._call("add", super().add, request, now_s, **options)

    def peer_ready(self, request_id: str, is_ready: bool = True) -> None:
        """As Scheduler.peer_ready."""
        self._call("peer_ready", super().peer_ready, request_id, is_ready)

    def cancel(self, request_id: str) -> bool:
        """As Scheduler.cancel."""
        return self._call("cancel", super().cancel, request_id)

    def fail(self, request_id: str, error: RequestError) -> Output | None:
        """As Scheduler.fail."""
        return self._call("fail", super().fail, request_id, error)

    def release(self, request_id: str) -> None:
        """As Scheduler.release."""
        self._call("release", super().release, request_id)

    def park(self, request_ids: tuple[str, ...]) -> str | None:
        """As Scheduler.park."""
        return self._call("park", super().park, request_ids)

    def unpark(self, request_id: str) -> None:
        """As Scheduler.unpark."""
        self._call("unpark", super().unpark, request_id)

    def expire(self, now_s: float) -> list[Output]:
        """As Scheduler.expire; written when it may change something."""
        return self._call("expire", super().expire, now_s, quiet=not self._arrivals.is_due(now_s))

    def schedule(self, now_s: float) -> Plan:
        """As Scheduler.schedule; written unless the scheduler is idle (an empty plan may reserve pages)."""
        with self.recorder.writing_on_failure("schedule", super().snapshot):
            plan = self._call("schedule", super().schedule, now_s, quiet=self.is_idle())
        self.recorder.add(now_s, plan)
        return plan

    def commit(self, result: StepResult, now_s: float) -> list[Output]:
        """As Scheduler.commit."""
        with self.recorder.writing_on_failure("commit", super().snapshot):
            return self._call("commit", super().commit, result, now_s)

    def check(self) -> None:
        """As Scheduler.check."""
        with self.recorder.writing_on_failure("check", super().snapshot):
            super().check()

    def snapshot(self) -> dict[str, Any]:
        """As Scheduler.snapshot; each sequence also with what it waits for (nothing known: it came after the latest plan)."""
        state = super().snapshot()
        for sequence in state["sequences"]:
            wait = self.why_not(sequence["request_id"])
            sequence["waits_for"] = None if wait is None or wait.cause is Cause.UNEXPLAINED else wait.text
        return state

    # --- for people who ask why

    def why_not(self, request_id: str) -> Wait | None:
        """Why the latest plan did nothing for a request; see `Explainer.why_not`. Changes nothing."""
        plan = self.recorder.latest
        if plan is None:
            return None
        return Explainer(self._table, self._admission, self._config, self._limits).why_not(request_id, plan)

    @property
    def table(self) -> SequenceTable:
        """The live sequences; to be read only."""
        return self._table

    # --- the other calls

    def take_reserved(self) -> list[Reserved]:
        """As Scheduler.take_reserved."""
        return self._call("take_reserved", super().take_reserved, quiet=not self._table.reserved)

    def take_retracted(self) -> list[EngineRequest]:
        """As Scheduler.take_retracted."""
        quiet = not self._table.retracted and self._admission.pin_in_the_way() is None
        return self._call("take_retracted", super().take_retracted, quiet=quiet)

    def remote_first_token(self, request_id: str, first: Output, now_s: float) -> Output:
        """As Scheduler.remote_first_token."""
        return self._call("remote_first_token", super().remote_first_token, request_id, first, now_s)

    def kv_arrived(self, request_id: str, now_s: float) -> None:
        """As Scheduler.kv_arrived."""
        self._call("kv_arrived", super().kv_arrived, request_id, now_s)

    def compute_locally(self, request_id: str, held_tokens: int = 0) -> bool:
        """As Scheduler.compute_locally."""
        return self._call("compute_locally", super().compute_locally, request_id, held_tokens)

    def fetch_first(self, request_id: str, held_limit: int) -> None:
        """As Scheduler.fetch_first."""
        self._call("fetch_first", super().fetch_first, request_id, held_limit)

    def drain(self) -> None:
        """As Scheduler.drain."""
        self._call("drain", super().drain)

    def reset_prefix_cache(self) -> int:
        """As Scheduler.reset_prefix_cache."""
        return self._call("reset_prefix_cache", super().reset_prefix_cache)

    def _call(self, name: str, function: Callable[..., Any], *args: Any, quiet: bool = False, **kwargs: Any) -> Any:
        """`quiet`: a polling call that cannot change anything is not written."""
        if self._file is None or quiet:
            return function(*args, **kwargs)
        line = {"call": name, "args": encode(args), "kwargs": _plain(kwargs)}
        if name not in CALLS_WITH_TIME:
            line["at_s"] = round(self._clock(), 6)
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            self._write({**line, "raised": type(error).__name__})
            raise
        self._write({**line, "result": encode(result)})
        return result

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        text = json.dumps(line, separators=(",", ":")) + "\n"
        try:
            self._file.write(text)
        except OSError as error:  # as on a full disk: what the log is about goes on
            _log.error("--schedule-log: %s: %s; it ends here", self._file.name, error.strerror)
            self.close_log()


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: encode(value) for key, value in kwargs.items()}


def _take_over(path: Path) -> TextIO:
    """`path`, empty and this process's alone; what the process before this one left, which may have crashed, is `.old` now."""
    while True:
        file = path.open("a", encoding="utf-8", buffering=1)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ConfigError(f"schedule_log {path}: another process writes it; name one file for each worker") from error
        opened = os.fstat(file.fileno())
        if path.exists() and os.path.samestat(opened, path.stat()):  # else another process has just renamed it
            if not opened.st_size:
                return file
            path.replace(path.with_name(path.name + ".old"))
        file.close()
