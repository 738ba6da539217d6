"""How long a request would wait for its slot, as the queue moves now; refuses one that would have too little time left.

Without this an overloaded worker serves nobody: whoever's turn comes has waited for nearly all of its time, and what is
computed for it is thrown away when its deadline passes. At four times what a fleet could serve, 9 of 10 prompt tokens were
computed for nobody, and a fifth as many requests ended well. By Little's law the wait is that of so many departures as requests
are before it.

It speaks of an unbroken queue only, of at least `FEW` requests, in which as many have been served, and when it has seen a fifth
of the time in question, or 30 s: a burst, or a stall that is over, is no overload. The rate is that of the latest 30 s and of
what serving the last `FEW` has taken beside: minutes where a prompt takes seconds, or many decode workers share what one
computes. Time in which fewer wait does not count, and what was before 30 s of it says nothing any more: behind one that is long
at its peer others are served as fast as they come, not as they could be. Deterministic: the clock is the caller's.
"""

from __future__ import annotations

from collections import deque
from math import inf

from jdisagg.core.errors import Overloaded
from jdisagg.core.requests import EngineRequest
from jdisagg.sched.retry import RetryTimes
from jdisagg.sched.states import Status
from jdisagg.sched.table import SequenceTable

QUEUE_SHARE = 0.5  # of the time a request has that may pass before its slot; the rest is for its tokens
FEW = 8  # of fewer nothing can be said
_LEAST_SEEN = 0.2  # of the wait in question
_WINDOW_S = 30.0  # over which the rate is taken, and what the latest FEW took beside it
_LONGEST_S = 600.0  # of that in all: of fewer nothing is said
_GRAIN_S = 0.5  # between samples of it
_LEAST_TIME_S = 0.5  # of who has less nothing is said: a short wait is no overload, and a deadline that ends it no waste
_STOPPED_S = 5.0  # between plans: that was no step, the process stood still
_SLOTLESS = (Status.WAITING, Status.PREALLOC, Status.TRANSFER, Status.READY)


class Forecast:
    """Counts who gets a slot while others wait for one, their peers' part included."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        # (time, seconds in which FEW waited, served in them), since somebody waits
        self._samples: deque[tuple[float, float, int]] = deque()
        self._latest_s = deque([-inf] * FEW, maxlen=FEW)  # when the latest ones were served while FEW waited
        self._since: tuple[float, int] | None = None  # when FEW wait: (time, served so far) as of the latest sample or later
        self._retry_times = RetryTimes()

    def check(self, request: EngineRequest, order: tuple[float, int], now_s: float) -> None:
        """Raises Overloaded, with `retry_after_s`, for a new request whose turn would come too late. One that goes on
        somewhere else is never refused."""
        time_s, num_before = request.deadline_s - now_s, self._num_before(order)
        if request.generated_token_ids or time_s < _LEAST_TIME_S or num_before < FEW or not self._samples:
            return
        spared_s = time_s * QUEUE_SHARE
        (_, first_s, num_first), (last_s, num_last) = self._samples[0], self._count(now_s)
        seen_s, num_served = last_s - first_s, num_last - num_first
        if num_served < FEW or seen_s < min(spared_s * _LEAST_SEEN, _WINDOW_S):
            return
        wait_s = num_before * seen_s / num_served
        if wait_s <= spared_s:
            return
        free_s, num_asked = now_s + wait_s - spared_s, request.num_asked
        retry_after_s = self._retry_times.retry_after_s(now_s, free_s, seen_s / num_served, num_asked)
        raise Overloaded(
            f"{num_before} requests are before it, a wait of some {wait_s:.1f} s, and its deadline is in "
            f"{time_s:.1f} s; retry in {retry_after_s:.1f} s, allow more time, or add a worker",
            retry_after_s=retry_after_s,
        )

    def added(self, now_s: float) -> None:
        """One more is about to wait."""
        num_waiting = self._num_waiting
        if not num_waiting:
            self._begin(now_s)
        if self._since is None and num_waiting + 1 >= FEW:
            self._since = now_s, self._table.stats.served

    def observe(self, now_s: float) -> None:
        """A plan was made."""
        num_waiting = self._num_waiting
        if not num_waiting or not self._samples:
            self._begin(now_s)
        sample = now_s, *self._count(now_s)
        self._since = (now_s, self._table.stats.served) if num_waiting >= FEW else None
        self._latest_s.extend([now_s] * min(FEW, sample[2] - self._samples[-1][2]))
        if len(self._samples) > 1 and now_s - self._samples[-2][0] < _GRAIN_S:
            self._samples[-1] = sample
        else:
            self._samples.append(sample)
        while len(self._samples) > 2 and self._is_old(self._samples[1], sample):
            self._samples.popleft()

    def _is_old(self, sample: tuple[float, float, int], latest: tuple[float, float, int]) -> bool:
        """What was before it is no part of the rate any more."""
        passed_s, seen_s = latest[0] - sample[0], latest[1] - sample[1]
        return self._latest_s[0] - sample[0] >= _WINDOW_S or passed_s - seen_s >= _WINDOW_S or passed_s >= _LONGEST_S

    def _begin(self, now_s: float) -> None:
        self._samples.clear()
        self._samples.append((now_s, 0.0, 0))
        self._since = now_s, self._table.stats.served

    def _count(self, now_s: float) -> tuple[float, int]:
        """As of now."""
        _, seen_s, num_served = self._samples[-1]
        if self._since is None:
            return seen_s, num_served
        since_s, num_before = self._since
        step_s = now_s - since_s
        return seen_s + (step_s if step_s < _STOPPED_S else 0.0), num_served + self._table.stats.served - num_before

    @property
    def _num_waiting(self) -> int:
        return sum(len(self._table.queues[status]) for status in _SLOTLESS)

    def _num_before(self, order: tuple[float, int]) -> int:
        """Whose turn comes before; of those who only want a slot, not who finds one free."""
        queues, num_free = self._table.queues, self._table.slots.num_free
        at_peers = queues[Status.PREALLOC].num_before(order) + queues[Status.TRANSFER].num_before(order)
        slotless = sum(queues[status].num_before(order) for status in (Status.WAITING, Status.READY, Status.FORKING))
        return at_peers + max(0, slotless - num_free)
