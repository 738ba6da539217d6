"""What happened to one request in one process, and when: its events, and its time by phase."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from math import inf
from typing import Any

from jdisagg.core.metrics import Metrics
from jdisagg.core.phases import Phase, Phases
from jdisagg.core.requests import EngineRequest

log = logging.getLogger(__name__)

MAX_EVENTS = 64  # of one request; of one that is preempted more often the first and the latest are kept
_NUM_FIRST = 2


class Event(Enum):
    """Steps of a request's life."""

    QUEUED = "queued"
    SCHEDULED = "scheduled"  # first work on its prompt, here or on a peer
    PREEMPTED = "preempted"
    RESUMED = "resumed"
    FINISHED = "finished"


class RequestRecord:
    """Owned by one thread. Times are seconds of its clock. What is no event of its own is told to `phases`."""

    def __init__(self, metrics: Metrics, request: EngineRequest, now_s: float, slow_s: float = inf) -> None:
        """The request was just queued. `slow_s`: one that takes longer is logged at INFO when it ends, others at DEBUG."""
        self._metrics = metrics
        self._request_id = request.request_id
        self._traceparent = request.traceparent
        self._arrived_s = now_s
        self._slow_s = slow_s
        self.phases = Phases(now_s)
        self._events: list[tuple[Event, float]] = [(Event.QUEUED, now_s)]
        self._num_dropped = 0
        self._more: Callable[[], str] = str  # nothing

    def ends_with(self, more: Callable[[], str]) -> None:
        """What its life in the log has besides, asked for when it ends."""
        self._more = more

    def scheduled(self, now_s: float) -> None:
        """Work on its prompt begins, or goes on after a preemption."""
        if self.phases.started(now_s):
            self._note(Event.SCHEDULED if self._events[-1][0] is Event.QUEUED else Event.RESUMED, now_s)

    def preempted(self, now_s: float) -> None:
        """It lost its pages and waits again."""
        self.phases.preempted(now_s)
        self._note(Event.PREEMPTED, now_s)

    def parked(self, now_s: float) -> None:
        """Its pages went to others before its receiver had any (prefill role)."""
        self.phases.parked(now_s)
        self._note(Event.PREEMPTED, now_s)

    def produced(self, now_s: float) -> None:
        """A token of it is known."""
        self.scheduled(now_s)
        self.phases.produced(now_s)

    def handed_over(self, now_s: float) -> None:
        """Its hand-off is over (prefill role)."""
        self.phases.handed_over()
        has_token = self.phases.has_token
        self.ended("hand-off over" if has_token else "given up before its first token", int(has_token), now_s)

    def ended(self, reason: str, num_tokens: int, now_s: float) -> None:
        """Whatever the end: its phases and their sum are observed, and its life is logged."""
        self.phases.ended(now_s)
        self._note(Event.FINISHED, now_s)
        metrics, seconds = self._metrics, self.phases.seconds
        for phase, histogram in (
            (Phase.QUEUE, metrics.requests.queue_seconds),
            (Phase.PREFILL, metrics.requests.prefill_seconds),
            (Phase.TRANSFER, metrics.requests.transfer_seconds),
            (Phase.DECODE, metrics.requests.decode_seconds),
        ):
            if phase in seconds:
                histogram.observe(seconds[phase])
        metrics.requests.seconds.observe(self.phases.total_s)
        level = logging.INFO if self.phases.total_s > self._slow_s else logging.DEBUG
        if log.isEnabledFor(level):
            log.log(level, "request %s%s: %s", self._request_id, self._trace_text(), self._life(reason, num_tokens))

    def snapshot(self) -> dict[str, Any]:
        """Events with seconds since it was queued, the phase it is in, its trace context."""
        events = [{"event": event.value, "at_s": round(at_s - self._arrived_s, 6)} for event, at_s in self._events]
        shown: dict[str, Any] = {"phase": self.phases.phase.value, "events": events, "traceparent": self._traceparent}
        return shown | ({"events_left_out": self._num_dropped} if self._num_dropped else {})

    def _note(self, event: Event, now_s: float) -> None:
        if len(self._events) >= MAX_EVENTS:
            del self._events[_NUM_FIRST]
            self._num_dropped += 1
        self._events.append((event, max(now_s, self._events[-1][1])))

    def _trace_text(self) -> str:
        return f" (traceparent {self._traceparent})" if self._traceparent else ""

    def _life(self, reason: str, num_tokens: int) -> str:
        parts = " + ".join(
            f"{phase.value} {self.phases.seconds[phase]:.3f} s" for phase in Phase if phase in self.phases.seconds
        )
        events = ", ".join(f"{event.value} +{at_s - self._arrived_s:.3f}" for event, at_s in self._events)
        left_out = f" ({self._num_dropped} events left out)" if self._num_dropped else ""
        more = f"; {text}" if (text := self._more()) else ""
        return f"{reason}, {num_tokens} tokens in {self.phases.total_s:.3f} s = {parts}; {events}{left_out}{more}"
