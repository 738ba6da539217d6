"""Where the time of an engine's thread goes: every second belongs to one stage, so the stages add up to the time it ran."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from jdisagg.core.metrics import Metrics


class Stage(Enum):
    """Parts of a tick. Values are the metric's labels."""

    IDLE = "idle"  # asleep on the inbox, nothing to do
    INBOX = "inbox"  # taking messages in
    PEERS = "peers"  # hand-offs: deadlines, pieces, replies
    PLAN = "plan"
    DISPATCH = "dispatch"  # starting the step on the device
    WAIT = "wait"  # for the tokens of the step before
    COMMIT = "commit"
    DELIVER = "deliver"  # outputs to clients, and metrics


_NOT_HOST = frozenset({Stage.IDLE, Stage.WAIT})  # the thread sleeps


class StageClock:
    """A stopwatch that never stops; owned by one engine thread."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._counters = {stage: metrics.engine.tick_seconds.labels(stage=stage.value) for stage in Stage}
        self._clock = clock
        self._host_seconds = metrics.engine.host_overhead_seconds
        self._last_s: float | None = None
        self._host_s = 0.0  # of this tick

    def start(self) -> None:
        """A tick begins; the first one starts the watch."""
        if self._last_s is None:
            self._last_s = self._clock()

    @property
    def at_s(self) -> float:
        """When the last lap ended."""
        assert self._last_s is not None, "read before start"
        return self._last_s

    def lap(self, stage: Stage) -> float:
        """The time since the last lap was spent in `stage`; returns its seconds."""
        assert self._last_s is not None, "lap before start"
        now_s = self._clock()
        seconds, self._last_s = now_s - self._last_s, now_s
        self._counters[stage].inc(seconds)
        if stage not in _NOT_HOST:
            self._host_s += seconds
        return seconds

    def end(self, *, dispatched: bool) -> None:
        """The tick is over. What it took the host is observed when it dispatched a step, whose start it may have delayed."""
        if dispatched:
            self._host_seconds.observe(self._host_s)
        self._host_s = 0.0
