"""How far what befell the workers of a request speaks against the request itself."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.api.worker.client import CLOSED, SILENT
from jdisagg.core.errors import HandoffLost, RequestError
from jdisagg.core.fleet import Key
from jdisagg.router.entry import Entry
from jdisagg.router.worker_news import EVICTED

SILENCE = 0.5  # deaths


@dataclass(frozen=True, slots=True)
class Lost:
    """The attempt is over without an end. `death`: the worker went down, as opposed to giving the request back."""

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


class Blame:
    """Of one request, in deaths."""

    def __init__(self) -> None:
        self._by_worker: dict[Key, float] = {}  # of those that may come back
        self._last_attempt: int | None = None

    @property
    def deaths(self) -> float:
        """All together."""
        return sum(self._by_worker.values())

    def add(self, lost: Lost, attempt: int) -> None:
        """It was in flight there, in that attempt, which is lost but once: what follows is said of the worker, which may end or
        be evicted behind a broken stream. Silence befalls several workers at once when a host or a network pauses: half a
        death."""
        if attempt == self._last_attempt:
            return
        self._last_attempt = attempt
        if lost.worker is not None:
            self._by_worker[lost.worker] = SILENCE if lost.reason in (SILENT, EVICTED) else 1.0

    def clear(self, worker: Key) -> None:
        """That process is back: it did not die of anything."""
        self._by_worker.pop(worker, None)
