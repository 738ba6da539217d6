"""The schedule log: every call to a scheduler and its result, one JSON line each; the last plans, always; and why one waits.

    {"call": "__init__", "args": [config], "kwargs": {sizes}}
    {"call": "add", "args": [request, now_s], "kwargs": {}, "result": null}
    {"call": "schedule", "args": [now_s], "kwargs": {}, "result": plan}
    {"call": "cancel", "args": [request_id], "kwargs": {}, "at_s": 12.5, "result": null}

A call that is not given the time has "at_s", by the same clock. One that raised has "raised": type name instead of "result".
`jdisagg.replay` runs such a log again. The last plans are written to a file when an assertion fails (`flight_recorder`).
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from time import monotonic
from typing import Any, TextIO, TypeVar, cast

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.errors import ConfigError
from jdisagg.core.files import lock
from jdisagg.core.requests import EngineRequest, Output, Role
from jdisagg.sched.explain import Cause, Explainer, Wait
from jdisagg.sched.flight_recorder import FlightRecorder
from jdisagg.sched.log_codec import encode
from jdisagg.sched.plan import Plan, StepResult
from jdisagg.sched.scheduler import Scheduler
from jdisagg.sched.table import Reserved, SequenceTable

_log = logging.getLogger(__name__)
_Method = TypeVar("_Method", bound=Callable[..., Any])

CALLS_WITH_TIME = frozenset({"add", "expire", "schedule"})  # their last argument
CALLS = CALLS_WITH_TIME | frozenset(  # that are written
    "commit remote_first_token kv_arrived peer_ready cancel fail park unpark take_reserved take_retracted compute_locally "
    "fetch_first drain reset_prefix_cache".split()
)


def make_scheduler(config: SchedulerConfig, *, role: Role, **sizes: Any) -> Scheduler:
    """The scheduler of a worker: recorded when `config.schedule_log` names a file. `sizes` are Scheduler's other arguments.

    When an assertion fails its last plans go to the log's directory, else to the one for temporary files, if there is one.
    """
    directory = _temporary_directory() if config.schedule_log is None else Path(config.schedule_log).parent
    return LoggedScheduler(config, role=role, plans_directory=directory, **sizes)


def _temporary_directory() -> Path | None:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:  # a container whose file systems are read-only
        _log.warning("the last plans before a failed invariant would not be kept: %s", error.strerror)
        return None


def _written(method: _Method) -> _Method:
    """The method of a LoggedScheduler that writes down every call, with the arguments that were given."""

    @wraps(method)
    def call(self: LoggedScheduler, *args: Any, **kwargs: Any) -> Any:
        return self._call(method, *args, **kwargs)

    return cast("_Method", call)


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
        """`clock` is the one by which callers say `now_s`. Raises ConfigError like Scheduler, and for a log file that cannot be
        written, or that another process writes."""
        super().__init__(config, role=role, **sizes)
        self.recorder = FlightRecorder(plans_directory, role.value)
        self._file: TextIO | None = None
        self._clock = clock
        self._is_settled = True  # idle, and planned since the latest call that was written: another plan changes nothing
        if config.schedule_log is not None:
            try:
                self._file = _take_over(Path(config.schedule_log))
            except OSError as error:
                raise ConfigError(
                    f"--schedule-log: {config.schedule_log} cannot be written: {error.strerror}; name another file"
                ) from error
            self._write({"call": "__init__", "args": encode([config]), "kwargs": _plain({"role": role, **sizes})})

    def close_log(self) -> None:
        """End the log file; idempotent. Calls after this are not written."""
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):  # part of a line that a full disk did not take
                file.close()

    def expire(self, now_s: float) -> list[Output]:
        """As Scheduler.expire; written when it may change something."""
        return self._call(Scheduler.expire, now_s, quiet=not self._arrivals.is_due(now_s))

    def schedule(self, now_s: float) -> Plan:
        """As Scheduler.schedule; written unless the scheduler is idle (an empty plan may reserve pages), and once when it is:
        that moves the bound of the queue."""
        idle = self.is_idle()
        with self.recorder.writing_on_failure("schedule", super().snapshot):
            plan = self._call(Scheduler.schedule, now_s, quiet=idle and self._is_settled)
        self._is_settled = idle
        self.recorder.add(now_s, plan)
        return plan

    def commit(self, result: StepResult) -> list[Output]:
        """As Scheduler.commit."""
        with self.recorder.writing_on_failure("commit", super().snapshot):
            return self._call(Scheduler.commit, result)

    def check(self) -> None:
        """As Scheduler.check."""
        with self.recorder.writing_on_failure("check", super().snapshot):
            super().check()

    def snapshot(self) -> dict[str, Any]:
        """As Scheduler.snapshot; each sequence also with what it waits for (nothing known: it came after the latest plan)."""
        state = super().snapshot()
        explainer = self._explainer()
        for sequence in state["sequences"]:
            wait = None if explainer is None else explainer.why_not(sequence["request_id"])
            sequence["waits_for"] = None if wait is None or wait.cause is Cause.UNEXPLAINED else wait.text
        return state

    # --- for people who ask why

    def why_not(self, request_id: str) -> Wait | None:
        """Why the latest plan did nothing for a request; see `Explainer.why_not`. Changes nothing."""
        explainer = self._explainer()
        return None if explainer is None else explainer.why_not(request_id)

    def num_planned(self, slot: int) -> int:
        """Tokens that a slot gets of the latest plan. Changes nothing."""
        plan = self.recorder.latest
        row = None if plan is None else self._steps.row(plan.step_id, slot)
        return 0 if row is None else row.num_samples

    def _explainer(self) -> Explainer | None:
        """Of the latest plan, until the next call."""
        if (plan := self.recorder.latest) is None:
            return None
        return Explainer(self._table, self._admission, self._rows, self._config, self._limits, plan)

    @property
    def table(self) -> SequenceTable:
        """The live sequences; to be read only."""
        return self._table

    # --- the other calls

    def take_reserved(self) -> list[Reserved]:
        """As Scheduler.take_reserved."""
        return self._call(Scheduler.take_reserved, quiet=not self._table.reserved)

    def take_retracted(self) -> list[EngineRequest]:
        """As Scheduler.take_retracted."""
        quiet = self._file is None or (not self._table.retracted and self._admission.pin_in_the_way() is None)
        return self._call(Scheduler.take_retracted, quiet=quiet)

    add = _written(Scheduler.add)
    peer_ready = _written(Scheduler.peer_ready)
    cancel = _written(Scheduler.cancel)
    fail = _written(Scheduler.fail)
    park = _written(Scheduler.park)
    unpark = _written(Scheduler.unpark)
    remote_first_token = _written(Scheduler.remote_first_token)
    kv_arrived = _written(Scheduler.kv_arrived)
    compute_locally = _written(Scheduler.compute_locally)
    fetch_first = _written(Scheduler.fetch_first)
    drain = _written(Scheduler.drain)
    reset_prefix_cache = _written(Scheduler.reset_prefix_cache)

    def _call(self, method: Callable[..., Any], *args: Any, quiet: bool = False, **kwargs: Any) -> Any:
        """`method` is the Scheduler's. `quiet`: a polling call that cannot change anything is not written."""
        if self._file is None or quiet:
            return method(self, *args, **kwargs)
        self._is_settled = False
        line = {"call": method.__name__, "args": encode(args), "kwargs": _plain(kwargs)}
        if method.__name__ not in CALLS_WITH_TIME:
            line["at_s"] = round(self._clock(), 6)
        try:
            result = method(self, *args, **kwargs)
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
            lock(file, f"schedule_log {path}", taken="writes it; name one file for each worker", choose="name one")
        except ConfigError:
            file.close()
            raise
        opened = os.fstat(file.fileno())
        if path.exists() and os.path.samestat(opened, path.stat()):  # else another process has just renamed it
            if not opened.st_size:
                return file
            path.replace(path.with_name(path.name + ".old"))
        file.close()
