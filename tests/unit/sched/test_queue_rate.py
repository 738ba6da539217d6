"""The rate at which places come free, from plans observed at times set by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jdisagg.core.errors import Overloaded
from jdisagg.sched.queue_limit import QueueLimit
from jdisagg.sched.states import LIVE, Status

OPEN = SimpleNamespace(wait=SimpleNamespace(is_open=True))  # whose peer has begun


class Waiting(list):
    def head(self, count: int) -> list[object]:
        return self[:count]


class Queue:
    """A waiting queue whose length is said, and its limit."""

    def __init__(self, max_queue_len: int = 10, num_free_slots: int = 0) -> None:
        self._table = SimpleNamespace(
            queues={status: Waiting() for status in LIVE}, slots=SimpleNamespace(num_free=num_free_slots)
        )
        self.limit = QueueLimit(self._table, max_queue_len)  # type: ignore[arg-type] # it only counts queues and free slots

    def holds(self, length: int) -> None:
        """That many wait, to be computed or fetched; and three choices for their siblings, which take no place."""
        self._table.queues[Status.FORKING] = [None] * 3
        ways = (Status.WAITING, Status.PREALLOC)
        for i, status in enumerate(ways):
            self._table.queues[status] = Waiting([OPEN] * len(range(i, length, len(ways))))

    def plan(self, now_s: float, length: int) -> None:
        """A plan at `now_s` leaves `length` waiting."""
        self.holds(length)
        self.limit.observe(now_s)

    def retry_s(self, now_s: float) -> float:
        """What somebody hears who is refused."""
        with pytest.raises(Overloaded) as caught:
            self.limit.admit(now_s)
        return caught.value.retry_after_s


def test_the_rate_is_that_of_the_last_30_seconds() -> None:
    queue = Queue()
    length = 1000
    for now_s in range(61):
        queue.plan(float(now_s), length)
        length -= 1 if now_s < 30 else 2
    assert queue.retry_s(60.0) == pytest.approx(0.5)


def test_a_single_stretch_longer_than_the_window_is_the_rate() -> None:
    queue = Queue()
    for now_s, length in ((0.0, 100), (31.0, 99), (62.0, 89)):
        queue.plan(now_s, length)
    assert queue.retry_s(62.0) == pytest.approx(3.1)


def test_time_since_the_last_plan_counts_while_somebody_waits() -> None:
    queue = Queue()
    queue.plan(0.0, 40)
    queue.plan(10.0, 30)
    assert queue.retry_s(15.0) == pytest.approx(1.5)


def test_time_without_a_queue_does_not_count() -> None:
    queue = Queue(max_queue_len=2)
    queue.plan(0.0, 10)
    queue.plan(20.0, 0)  # ten left in 20 s
    queue.plan(50.0, 0)
    queue.holds(2)
    assert queue.retry_s(60.0) == pytest.approx(2.0)


def test_those_who_came_since_the_last_plan_have_left_when_they_do_not_wait() -> None:
    queue = Queue(max_queue_len=9)
    queue.plan(0.0, 5)
    for _ in range(3):
        queue.limit.admit(0.5)
    queue.plan(4.0, 6)  # 5 + 3 - 6 = 2 in 4 s
    queue.plan(8.0, 7)  # one came back: nobody left
    queue.holds(9)
    assert queue.retry_s(8.0) == pytest.approx(4.0)


def test_plans_in_quick_succession_cost_no_memory_and_no_accuracy() -> None:
    queue = Queue()
    length = 100_000
    for tick in range(10_000):
        queue.plan(tick / 100, length)
        length -= 1 if tick < 6000 else (tick % 5 == 0)
    assert queue.retry_s(99.99) == pytest.approx(0.1, abs=1e-9)  # MIN_RETRY_S: 20 a second leave
    assert len(queue.limit._samples) < 130


def test_a_slow_rate_is_accurate_between_quick_plans() -> None:
    queue = Queue()
    for tick in range(1001):
        queue.plan(tick / 10, 1000 - tick // 20 if tick <= 600 else 970 - (tick - 600) // 40)
    assert queue.retry_s(100.0) == pytest.approx(4.0, rel=0.1)  # 30.1 s hold seven or eight of them


@pytest.mark.parametrize(("length", "is_refused"), [(9, False), (10, True)])
def test_the_queue_is_full_at_its_length(length: int, is_refused: bool) -> None:
    queue = Queue(max_queue_len=10)
    queue.holds(length)
    if is_refused:
        assert queue.retry_s(0.0) == 1.0
    else:
        queue.limit.admit(0.0)


@pytest.mark.parametrize(("num_free_slots", "taken"), [(0, 2), (1, 3), (3, 5)])
def test_who_may_find_a_free_slot_at_the_next_plan_does_not_wait_before_it(num_free_slots: int, taken: int) -> None:
    queue = Queue(max_queue_len=2, num_free_slots=num_free_slots)
    for length in range(taken):
        queue.holds(length)
        queue.limit.admit(0.0)
    queue.holds(taken)
    assert queue.retry_s(0.0) > 0.0
    queue.plan(1.0, 1)  # and one found none: it lacks memory, as others may who come behind it
    queue.limit.admit(1.0)
    queue.holds(2)
    assert queue.retry_s(1.0) > 0.0
