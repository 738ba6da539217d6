"""Whom a server serves: what tells one that serves nobody any more from one that is busy, or that fails this request alone."""

from __future__ import annotations

from math import inf

from jdisagg.batch.turns import LONG_S, Turns

SERVED = 200  # no other answer takes anybody who computes: a router without workers says that a prompt is too long
MOST_LOST = 8  # for good, one after the other: a fleet that loses everybody's, and no fault of these


class Service:
    """Of one server, as far as one batch has seen it. Time is passed in."""

    def __init__(self, turns: Turns, patience_s: float) -> None:
        """`patience_s`: for so long it may serve nobody."""
        self._turns = turns
        self._patience_s = patience_s
        self._long_s = min(LONG_S, patience_s / 2)
        self._answered_s = -inf  # the latest answer came, whatever it said
        self._served_s = -inf  # .. and one that served its request
        self._sent_s = -inf  # the latest of those that were served had been
        self._busy_s = -inf  # one was being computed, when somebody asked last
        self._losing_s = inf  # the first of those below was lost first
        self._num_lost = 0  # for good, and nobody was served since

    def answered(self, status_code: int, sent_s: float, now_s: float) -> None:
        """A request was, which had been sent then."""
        self._answered_s = now_s
        if status_code == SERVED:
            self._served_s, self._sent_s = now_s, max(self._sent_s, sent_s)
            self._losing_s, self._num_lost = inf, 0

    def silent_s(self, since_s: float, now_s: float) -> float:
        """For how long it answered nobody, since then at most. Of a server that may not be there."""
        return now_s - max(since_s, self._answered_s)

    def unserved_s(self, since_s: float, now_s: float) -> float:
        """For how long it served nobody and was not busy, since then at most. Of a server that is there."""
        longest_s = self._turns.longest_s()
        if longest_s > self._long_s:  # it will come to others, too
            self._busy_s = now_s
        not_yet_s = self._long_s if 0 < longest_s <= self._long_s else 0.0  # whether that one is refused is known by then
        return now_s - max(since_s, self._served_s, self._busy_s) - not_yet_s

    def passed_over(self, since_s: float) -> bool:
        """Whether others were served that had been sent when this request was in vain already, since then: it is to blame."""
        return since_s < self._sent_s

    def lost_for_good(self, since_s: float, now_s: float) -> bool:
        """One more request is given up, which was lost first then. Whether it is the server that loses everybody's."""
        if self.passed_over(since_s):
            return False
        self._num_lost += 1
        self._losing_s = min(self._losing_s, since_s)
        return self._num_lost >= MOST_LOST and self.unserved_s(self._losing_s, now_s) >= self._patience_s
