"""The bound of the waiting queue: refuses what it cannot hold, and says when to come again.

Who came since the latest plan, which left nobody waiting, may find a free slot at the next one, and does not count as waiting
before that. Nor do those on D for which a slot is free, and whose P has not begun: a burst at an idle pair waits for P alone.
Refused requests are given places one after the other, as fast as places were seen to come free: with ten a second leaving the
queue, the first one refused hears 0.1 s, the tenth 1 s, and they do not all come back at once. Choices that would share one
place are given one.
Deterministic: the clock is the caller's.
"""

from __future__ import annotations

from collections import deque

from jdisagg.core.errors import Overloaded
from jdisagg.core.latest import remember
from jdisagg.sched.retry import MIN_RETRY_S, RetryTimes
from jdisagg.sched.states import Status
from jdisagg.sched.table import SequenceTable

UNKNOWN_RETRY_S = 1.0  # nothing has left a queue yet
MOST_GROUPS = 64  # refused at about the same time; a forgotten one is promised another place
_WINDOW_S = 30.0  # of time with a queue, over which the rate is taken
_GRAIN_S = 0.5  # between samples of it


class QueueLimit:
    """Counts who leaves the queue. Time during which nobody waits does not count: it says nothing about the rate."""

    def __init__(self, table: SequenceTable, max_queue_len: int) -> None:
        self._table = table
        self._max_queue_len = max_queue_len
        self._num_queued = 0  # behind the latest plan
        self._num_added = 0  # since
        self._observed_s: float | None = None
        self._samples: deque[tuple[float, int]] = deque([(0.0, 0)])  # (seconds with a queue, left it), both since start
        self._retry_times = RetryTimes()
        self._promised_s: dict[str, float] = {}  # to latest groups, when their place comes free

    def admit(self, now_s: float, *, goes_on: bool = False, num_asked: int = 1, group: str = "", kept: int = 0) -> None:
        """One more waits from now on. Raises Overloaded with `retry_after_s` when the queue is full, as one of `num_asked`, but
        for a stream that `goes_on` after another worker: its client has seen some of it, and was promised the rest. All of one
        `group` would take one place: the first of them to be refused is promised one, the others hear of the same.
        `kept`: so many free places are others', of half of the queue at most: it shall not run dry."""
        num_waiting = self._count() - self._num_expected()
        kept = min(kept, self._max_queue_len // 2)
        if goes_on or num_waiting < self._max_queue_len - kept:
            self._num_added += 1
            return
        if (promised_s := self._promised_s.get(group, now_s)) > now_s:
            retry_after_s = max(MIN_RETRY_S, promised_s - now_s)
        else:
            retry_after_s = self._retry_times.retry_after_s(now_s, now_s, self._seconds_per_place(now_s), num_asked)
        if group:
            remember(self._promised_s, group, now_s + retry_after_s, MOST_GROUPS)
        others = "" if num_waiting >= self._max_queue_len else ", and the last places are for others"
        raise Overloaded(
            f"{num_waiting} requests are waiting, max_queue_len is {self._max_queue_len}{others}; "
            f"retry in {retry_after_s:.1f} s or add a worker",
            retry_after_s=retry_after_s,
        )

    def observe(self, now_s: float) -> None:
        """A plan was made."""
        num_queued = self._count()
        if self._num_queued and self._observed_s is not None:
            busy_s, num_left = self._samples[-1]
            left = max(0, self._num_queued + self._num_added - num_queued)  # preempted ones come back into it
            sample = (busy_s + max(0.0, now_s - self._observed_s), num_left + left)
            if len(self._samples) > 1 and sample[0] - self._samples[-2][0] < _GRAIN_S:
                self._samples[-1] = sample
            else:
                self._samples.append(sample)
            while len(self._samples) > 2 and self._samples[-1][0] - self._samples[1][0] >= _WINDOW_S:
                self._samples.popleft()
        self._num_queued, self._num_added, self._observed_s = num_queued, 0, now_s

    def _seconds_per_place(self, now_s: float) -> float:
        (first_s, first_left), (last_s, last_left) = self._samples[0], self._samples[-1]
        since_s = 0.0 if self._observed_s is None or not self._num_queued else max(0.0, now_s - self._observed_s)
        seconds, left = last_s - first_s + since_s, last_left - first_left
        return seconds / left if left else max(UNKNOWN_RETRY_S, seconds)

    def _num_expected(self) -> int:
        """Of those who wait, how many have a free slot before them and no one else."""
        queues = self._table.queues
        num_free = self._table.slots.num_free - len(queues[Status.TRANSFER]) - len(queues[Status.READY])
        if num_free <= 0:
            return 0
        at_peers = sum(not one.wait.is_open for one in queues[Status.PREALLOC].head(num_free))
        return max(at_peers, 0 if self._num_queued else min(self._num_added, num_free))

    def _count(self) -> int:
        return sum(len(self._table.queues[status]) for status in (Status.WAITING, Status.PREALLOC))
