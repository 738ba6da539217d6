"""What befell the workers of one request, how far that speaks against it, and how long its client has waited."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.api.worker.client import CLOSED, SILENT
from jdisagg.core.errors import Deadly, HandoffLost, Overloaded, RequestError
from jdisagg.core.fleet import Key
from jdisagg.router.entry import Entry
from jdisagg.router.worker_news import EVICTED

SILENCE = 0.5  # deaths
MOST_ASKED = 32  # full workers, one behind the other, of a fleet that has more


@dataclass(frozen=True, slots=True)
class Lost:
    """The attempt is over without an end. `death`: its worker, or all prefill workers it asked, went down, as opposed to giving
    the request back."""

    error: RequestError
    death: bool
    worker: Key | None = None  # one that went down ..
    reason: str = ""  # .. and how

    @classmethod
    def of(cls, entry: Entry, reason: str) -> Lost:
        """What the requests on a lost worker are told."""
        error = HandoffLost(f"worker {entry.member.worker} was lost: {reason}")
        death = reason != CLOSED and not entry.member.draining
        return cls(error, death, entry.key if death else None, reason)

    @classmethod
    def told(cls, error: RequestError) -> Lost:
        """What a worker says that goes on without it."""
        return cls(error, death=isinstance(error, Deadly))

    @property
    def num_down(self) -> int:
        """Workers that went down, at least."""
        return self.error.num_down if isinstance(self.error, Deadly) else int(self.death)


class Setbacks:
    """Of one request, over all its attempts."""

    def __init__(self) -> None:
        self.tried: frozenset[str] = frozenset()  # addresses that failed it
        # each attempt that was lost counts in one of three:
        self.deaths = 0  # of workers; of prefill workers there may be several in one
        self._num_full = 0  # it was given back by one that did nothing for it, until all have been asked
        self.refusals = 0  # it was given back
        self.replays = 0  # but for what full workers passed on, which had nothing of it
        self.last, self.worker = "", ""  # what the attempt before this one was lost to, and where
        self._blamed: dict[Key, float] = {}  # deaths, by workers that may come back
        self._num_deadly = 0  # attempts with which prefill workers went down: each is a death
        self._blamed_attempt: int | None = None  # the last one
        self._retry_after_s: float | None = None  # the soonest that a full worker named
        self._since_s: float | None = None  # the attempt was lost and the next one has brought nothing yet

    @property
    def blame(self) -> float:
        """All deaths that speak against the request."""
        return sum(self._blamed.values()) + self._num_deadly

    def blame_for(self, lost: Lost, attempt: int) -> None:
        """It was in flight there, in that attempt, which is lost but once: what follows is said of the worker, which may end or
        be evicted behind a broken stream. Silence befalls several workers at once when a host or a network pauses: half a
        death."""
        if attempt == self._blamed_attempt:
            return
        self._blamed_attempt = attempt
        if isinstance(lost.error, Deadly):
            self._num_deadly += 1
        elif lost.worker is not None:
            self._blamed[lost.worker] = SILENCE if lost.reason in (SILENT, EVICTED) else 1.0

    def add(self, lost: Lost, worker: str, now_s: float, *, is_full: bool, alone: bool) -> None:
        """An attempt was lost there; the one before it may have been, too, before it brought anything. `is_full`: the worker
        did nothing for it. `alone`: all others have lost it, too."""
        if not is_full and self._since_s is None:
            self._since_s = now_s
        self.last, self.worker = lost.error.message, worker
        if lost.death:
            self.deaths += lost.num_down
        elif is_full and not (alone or self.has_asked_all):
            self._num_full += 1
        else:
            self.refusals += 1
            if is_full:
                self._num_full = MOST_ASKED

    @property
    def has_asked_all(self) -> bool:
        """Every worker there is, or as many as one asks that finds them full."""
        return self._num_full >= MOST_ASKED

    def is_back(self, worker: Key) -> None:
        """That process did not die of anything."""
        self._blamed.pop(worker, None)

    def refused(self, error: Overloaded) -> Overloaded:
        """A full worker gave it back: the error to end with, should all be full, names the soonest time of any of them."""
        self._retry_after_s = min(error.retry_after_s, self._retry_after_s or error.retry_after_s)
        return Overloaded(error.message, retry_after_s=self._retry_after_s)

    def overcome(self, now_s: float) -> float | None:
        """The client hears again: seconds since the first loss, None when there was none."""
        since_s, self._since_s = self._since_s, None
        return None if since_s is None else now_s - since_s
