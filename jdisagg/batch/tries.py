"""How often one request of a batch was asked in vain, and why: whether it is asked again, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jdisagg.core.errors import JdisaggError

Answer = tuple[int, dict[str, Any]]  # HTTP status, JSON object
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
MOST_TIMES_TAKEN = 5  # and not answered, by a server that was there each time afterwards
ONE_BY_ONE_FROM = 2  # times: once may be a restart, which is the fault of none of the many that it cut off
QUARANTINE_S = 65.0  # a router refuses for a minute what was in flight when several workers died


class BadAnswer(JdisaggError):
    """A server that is there answers this request with nothing that can be kept; ends it and no other."""


@dataclass(frozen=True)
class NotNow:
    """Why to ask again."""

    why: str
    taken: bool = False  # the server had the request, then hung up or said nothing: it may be the request's fault
    timed_out: bool = False
    stood_still: bool = False  # this process did meanwhile: it is nobody's fault
    lost: bool = False  # by the server's workers or on the way to them, or by a server behind a proxy
    quarantined: bool = False  # besides: several workers died of it, or beside it
    retry_after_s: float = 0.0  # the server says: not before
    answer: Answer | None = None  # to be kept, should none be better


class Tries:
    """What became of a request that a server took each time, and did not answer."""

    def __init__(self) -> None:
        self._times_taken = 0
        self._times_still = 0  # besides: held against nobody
        self._rested_s = 0.0  # behind losses
        self._lost_s: float | None = None  # first
        self.is_quarantined = False  # it is asked once more, and nobody beside it

    @property
    def is_suspect(self) -> bool:
        """It may bring the server down: it is asked while no other such request is."""
        return self._times_taken >= ONE_BY_ONE_FROM or self._rested_s > 0

    def add(self, outcome: NotNow) -> Answer | None:
        """Once more, by a server that is there. Returns what is kept of that; None: to be asked again. Raises BadAnswer."""
        if outcome.stood_still and self._times_still < MOST_TIMES_TAKEN:
            self._times_still += 1
            return None
        self._times_taken += 1
        if not (outcome.timed_out or self._times_taken == MOST_TIMES_TAKEN):
            return None
        if outcome.answer is None:
            raise BadAnswer(f"the server took the request {self._times_taken} times and answered others only: {outcome.why}")
        return outcome.answer

    def lost_since_s(self, now_s: float) -> float:
        """Once more lost. When it was the first time."""
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        return self._lost_s

    def rest_s(self, outcome: NotNow, patience_s: float) -> float | None:
        """Once more lost, by a server that was there all the time. Returns how long to wait before it is asked again, with all
        waits but that for the end of a quarantine at most `patience_s`; None: what was answered is kept."""
        if self.is_quarantined or self._rested_s >= patience_s:
            return None
        if outcome.quarantined:
            self.is_quarantined = True
            return QUARANTINE_S
        pause_s = max(min(self._rested_s + FIRST_PAUSE_S, LONGEST_PAUSE_S), outcome.retry_after_s)  # twice the last one
        pause_s = min(pause_s, patience_s - self._rested_s)
        self._rested_s += pause_s
        return pause_s


class Absence:
    """Of a server that refuses, or is not there."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.since_s = began_s  # less the time in which it was asked nothing
        self._pause_s = FIRST_PAUSE_S

    def pause_s(self, least_s: float = 0.0) -> float:
        """Before it is asked again, longer each time."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return max(pause_s, least_s)
