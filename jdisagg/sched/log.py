"""The schedule log: every call to a scheduler and its result, one JSON line each; and the last plans, always.

    {"call": "__init__", "args": [config], "kwargs": {sizes}}
    {"call": "add", "args": [request, now_s], "kwargs": {}, "result": null}
    {"call": "schedule", "args": [now_s], "kwargs": {}, "result": plan}

A call that raised has "raised": type name instead of "result". `jdisagg.replay` runs such a log again.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.errors import RequestError
from jdisagg.core.requests import EngineRequest, Output, Role
from jdisagg.sched.log_codec import encode
from jdisagg.sched.plan import Plan, StepResult
from jdisagg.sched.scheduler import Scheduler
from jdisagg.sched.views import Reserved

NUM_RECENT_PLANS = 256


def make_scheduler(config: SchedulerConfig, *, role: Role, **sizes: Any) -> Scheduler:
    """The scheduler of a worker: recorded when `config.schedule_log` names a file. `sizes` are Scheduler's other arguments."""
    return LoggedScheduler(config, role=role, **sizes)


class LoggedScheduler(Scheduler):
    """A Scheduler that writes down its calls. Inherits because roles name the concrete type and must not notice."""

    def __init__(self, config: SchedulerConfig, *, role: Role, **sizes: Any) -> None:
        """Raises ConfigError like Scheduler, OSError when the log file cannot be written."""
        super().__init__(config, role=role, **sizes)
        self.recent_plans: deque[Plan] = deque(maxlen=NUM_RECENT_PLANS)  # not empty ones, latest last
        self._file: TextIO | None = None
        if config.schedule_log is not None:
            self._file = Path(config.schedule_log).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115 - lives as long
            self._write({"call": "__init__", "args": encode([config]), "kwargs": _plain({"role": role, **sizes})})

    def close_log(self) -> None:
        """End the log file; idempotent. Calls after this are not written."""
        if self._file is not None:
            self._file.close()
            self._file = None

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

    def expire(self, now_s: float) -> list[Output]:
        """As Scheduler.expire; written when it may change something."""
        return self._call("expire", super().expire, now_s, quiet=not self._complete and now_s < self._next_deadline_s)

    def schedule(self, now_s: float) -> Plan:
        """As Scheduler.schedule; written unless the scheduler is idle (an empty plan may reserve pages)."""
        plan = self._call("schedule", super().schedule, now_s, quiet=self.is_idle())
        if not plan.is_empty:
            self.recent_plans.append(plan)
        return plan

    def commit(self, result: StepResult, now_s: float) -> list[Output]:
        """As Scheduler.commit."""
        return self._call("commit", super().commit, result, now_s)

    def take_reserved(self) -> list[Reserved]:
        """As Scheduler.take_reserved."""
        return self._call("take_reserved", super().take_reserved, quiet=not self._table.reserved)

    def take_retracted(self) -> list[EngineRequest]:
        """As Scheduler.take_retracted."""
        return self._call("take_retracted", super().take_retracted, quiet=not self._table.retracted)

    def remote_first_token(self, request_id: str, first: Output, now_s: float) -> Output:
        """As Scheduler.remote_first_token."""
        return self._call("remote_first_token", super().remote_first_token, request_id, first, now_s)

    def kv_arrived(self, request_id: str, now_s: float) -> None:
        """As Scheduler.kv_arrived."""
        self._call("kv_arrived", super().kv_arrived, request_id, now_s)

    def compute_locally(self, request_id: str, held_tokens: int = 0) -> bool:
        """As Scheduler.compute_locally."""
        return self._call("compute_locally", super().compute_locally, request_id, held_tokens)

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
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            self._write({**line, "raised": type(error).__name__})
            raise
        self._write({**line, "result": encode(result)})
        return result

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: encode(value) for key, value in kwargs.items()}
