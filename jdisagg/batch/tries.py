"""How often one request of a batch was asked in vain, and why: whether it is asked again, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jdisagg.core.errors import JdisaggError

Answer = tuple[int, dict[str, Any]]  # HTTP status, JSON object
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
MOST_TIMES_TAKEN = 5  # and not answered, by a server that was there each time afterwards
ALONE_FROM = 2  # times: once may be a restart, which is the fault of none of the many that it cut off


class BadAnswer(JdisaggError):
    """A server that is there answers this request with nothing that can be kept; ends it and no other."""


@dataclass(frozen=True)
class NotNow:
    """Why to ask again."""

    why: str
    taken: bool = False  # the server had the request, then hung up or said nothing: it may be the request's fault
    timed_out: bool = False
    stood_still: bool = False  # this process did meanwhile: it is nobody's fault
    retry_after_s: float = 0.0  # the server says: not before
    answer: Answer | None = None  # to be kept, should the server go on to serve others and never this one


class Tries:
    """What became of a request that a server took each time, and did not answer."""

    def __init__(self) -> None:
        self._times_taken = 0
        self._times_still = 0  # besides: held against nobody

    @property
    def is_suspect(self) -> bool:
        """It may bring the server down: it is asked while no other such request is."""
        return self._times_taken >= ALONE_FROM

    def add(self, outcome: NotNow) -> Answer | None:
        """Once more, by a server that is there. Returns what is kept of that; None: to be asked again. Raises BadAnswer."""
        if outcome.stood_still and self._times_still < MOST_TIMES_TAKEN:
            self._times_still += 1
            return None
        self._times_taken += 1
        if outcome.answer is None and (outcome.timed_out or self._times_taken == MOST_TIMES_TAKEN):
            raise BadAnswer(f"the server took the request {self._times_taken} times and answered others only: {outcome.why}")
        return outcome.answer


class Absence:
    """Of a server that refuses, or is not there."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self._pause_s = FIRST_PAUSE_S

    def pause_s(self, least_s: float = 0.0) -> float:
        """Before it is asked again, longer each time."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return max(pause_s, least_s)
