"""What went wrong for one request so far, and how long its client has waited for that."""

from __future__ import annotations

from jdisagg.core.errors import Overloaded
from jdisagg.router.blame import Blame


class Setbacks:
    """Of one request, over all its attempts."""

    def __init__(self) -> None:
        self.tried: frozenset[str] = frozenset()  # addresses that failed it
        self.deaths = 0
        self.refusals = 0
        self.last = ""  # what the attempt before this one was lost to
        self.blame = Blame()
        self._retry_after_s: float | None = None  # the soonest that a full worker named
        self._since_s: float | None = None  # the attempt was lost and the next one has brought nothing yet

    def refused(self, error: Overloaded) -> Overloaded:
        """A full worker gave it back: the error to end with, should all be full, names the soonest time of any of them."""
        self._retry_after_s = min(error.retry_after_s, self._retry_after_s or error.retry_after_s)
        return Overloaded(error.message, retry_after_s=self._retry_after_s)

    def begin(self, now_s: float) -> None:
        """An attempt was lost; the one before it may have been, too, before it brought anything."""
        self._since_s = now_s if self._since_s is None else self._since_s

    def overcome(self, now_s: float) -> float | None:
        """The client hears again: seconds since the first loss, None when there was none."""
        since_s, self._since_s = self._since_s, None
        return None if since_s is None else now_s - since_s
