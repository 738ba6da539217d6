"""The last plans of a scheduler, kept always, and written to a file when an invariant fails."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from jdisagg.sched.log_codec import encode
from jdisagg.sched.plan import Plan

log = logging.getLogger(__name__)

NUM_RECENT_PLANS = 256
MAX_ADMITTED_TOKENS = 2**20  # of requests that the plans kept admit; some 40 MB, and about a second to write

MAX_FILES = 8  # of a role in one directory: what fails may do so again after each start, and each process has a name of its own


class FlightRecorder:
    """Holds up to NUM_RECENT_PLANS plans that were not empty, latest last; fewer when they admit too much, but always one."""

    def __init__(self, directory: Path | None, role: str) -> None:
        """`directory`: where files go; None keeps the plans and writes none."""
        self.plans: deque[tuple[float, Plan]] = deque()  # (now_s of the call, plan)
        self._num_admitted_tokens = 0
        self.latest: Plan | None = None  # the empty ones too
        self._directory = directory
        self._role = role

    def add(self, now_s: float, plan: Plan) -> None:
        """Remember a plan, as of a call at `now_s`."""
        self.latest = plan
        if plan.is_empty:
            return
        self.plans.append((now_s, plan))
        self._num_admitted_tokens += _num_admitted_tokens(plan)
        while len(self.plans) > NUM_RECENT_PLANS or (len(self.plans) > 1 and self._num_admitted_tokens > MAX_ADMITTED_TOKENS):
            _, oldest = self.plans.popleft()
            self._num_admitted_tokens -= _num_admitted_tokens(oldest)

    @contextmanager
    def writing_on_failure(self, call: str, snapshot: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """An AssertionError inside is logged with the file that holds the plans, then goes on its way."""
        try:
            yield
        except AssertionError as error:
            if self._directory is not None:
                name = f"jdisagg-plans-{self._role}"
                path = self._directory / f"{name}-{os.getpid()}.jsonl"
                _make_room(self._directory, name)
                self._write(path, call, error, snapshot)
            raise

    def _write(self, path: Path, call: str, error: AssertionError, snapshot: Callable[[], dict[str, Any]]) -> None:
        first = {"failed": call, "error": f"{type(error).__name__}: {error}", "state": _state(snapshot)}
        lines = [first, *({"now_s": now_s, "plan": encode(plan)} for now_s, plan in self.plans)]
        try:
            with _new_file(path) as file:
                file.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        except OSError as problem:
            log.critical("invariant of the scheduler failed in %s: %s; its plans are lost: %s", call, error, problem)
        else:
            log.critical("invariant of the scheduler failed in %s: %s; last %d plans: %s", call, error, len(self.plans), path)


def _num_admitted_tokens(plan: Plan) -> int:
    return sum(len(admit.prompt_token_ids) + len(admit.generated_token_ids) for admit in plan.admit)


def _make_room(directory: Path, name: str) -> None:
    """For one more file of processes, as what they are numbered by tells: the oldest ones go. Those of other users stay."""
    written = list[tuple[float, Path]]()
    with suppress(OSError):
        for path in directory.glob(f"{name}-*.jsonl"):
            if path.stem.removeprefix(f"{name}-").isdecimal():
                with suppress(OSError):  # another process does the same
                    status = path.lstat()
                    if status.st_uid == os.geteuid():
                        written.append((status.st_mtime, path))
    for _, path in sorted(written)[: max(0, len(written) - MAX_FILES + 1)]:
        with suppress(OSError):
            path.unlink()


def _new_file(path: Path) -> TextIO:
    """In the place of one of that name, and nobody else's to read: plans have prompts of clients in them. Raises OSError."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8")


def _state(snapshot: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return snapshot()
    except Exception as error:  # noqa: BLE001 - a broken invariant may break the snapshot too; the failure itself is reported
        return {"error": repr(error)}
