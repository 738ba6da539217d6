"""The transition table, the queue and the slots."""

from __future__ import annotations

import pytest

from jdisagg.sched.queue import SequenceQueue
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.slots import Slots
from jdisagg.sched.states import ALLOWED, IllegalTransition, Status, check_transition
from tests.unit.sched.engine_fake import request

LEGAL = {
    "waiting": "running prealloc finished",
    "prealloc": "transfer waiting finished",
    "transfer": "ready waiting finished",
    "ready": "running waiting prealloc finished",
    "forking": "ready waiting prealloc finished",
    "running": "waiting prealloc publishing finished",
    "publishing": "parked finished",
    "parked": "waiting finished",
    "finished": "",
}


@pytest.mark.parametrize("old", list(Status))
@pytest.mark.parametrize("new", list(Status))
def test_a_status_changes_along_the_table_or_raises(old: Status, new: Status) -> None:
    if new.value in LEGAL[old.value].split():
        check_transition("a", old, new)
    else:
        with pytest.raises(IllegalTransition, match=f"{old.value} -> {new.value}"):
            check_transition("a", old, new)


def test_finished_is_absorbing_and_reached_from_everywhere() -> None:
    assert ALLOWED[Status.FINISHED] == frozenset()
    assert all(Status.FINISHED in targets for old, targets in ALLOWED.items() if old is not Status.FINISHED)


def sequence(priority: int, arrival: int) -> Sequence:
    """One for queues."""
    asked = request(f"r{arrival}", (1,))
    return Sequence(request=asked, order=(priority, arrival), status=Status.WAITING, target=1, stop_ids=frozenset())


def test_a_queue_is_in_order_of_priority_then_arrival_whatever_the_insertion_order() -> None:
    queue = SequenceQueue()
    made = [sequence(p, a) for a, p in enumerate((1, 0, 1, 0))]
    for s in reversed(made):
        queue.add(s)
    assert [s.order for s in queue] == [(0, 1), (0, 3), (1, 0), (1, 2)]
    assert queue.last is made[2]
    for s in queue:
        queue.remove(s)  # iterating is over a snapshot
    assert (len(queue), queue.last, queue.at(0)) == (0, None, None)
    with pytest.raises(AssertionError):
        queue.remove(made[0])


def test_the_lowest_slot_is_taken_and_an_eviction_is_told_once() -> None:
    slots = Slots(3)
    assert [slots.take() for _ in range(3)] == [0, 1, 2]
    slots.give_back(2)
    slots.give_back(1)
    with pytest.raises(AssertionError):
        slots.give_back(1)
    assert slots.take() == 1
    assert slots.has_evictions
    assert slots.take_evictions() == (1, 2)
    assert slots.take_evictions() == ()
    assert slots.num_free == 1
