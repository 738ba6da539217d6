"""Decode workers that wait for one full prefill worker get as many places in its queue, whoever came first."""

from __future__ import annotations

from typing import Any

import pytest

from jdisagg.core.errors import Overloaded
from jdisagg.handoff.events import PeerMessage, PeerOpened
from jdisagg.handoff.messages import Accepted, HandoffId, Open, PrefillToDecode, Refused, StreamEnded
from jdisagg.roles.queue_shares import BACK_S, QueueShares
from tests.unit.roles.world import World
from tests.unit.sched.engine_fake import request

pytestmark = pytest.mark.usefixtures("no_sleep")


def shares(**num_here: int) -> QueueShares:
    """So many prompts of each receiver."""
    queue = QueueShares()
    for receiver, number in num_here.items():
        for index in range(number):
            queue.opened(f"{receiver}-{index}", receiver)
    return queue


def test_a_place_is_kept_for_one_that_was_refused_from_those_that_have_more_here() -> None:
    queue = shares(d0=3, d1=2, d2=2)
    assert queue.num_kept("d0", 0.0) == 0, "nobody was refused"
    queue.refused("d1", 0.0)
    queue.refused("new", 0.0)
    kept = {receiver: queue.num_kept(receiver, 0.0) for receiver in ("d0", "d1", "d2", "new")}
    assert kept == {"d0": 2, "d1": 1, "d2": 1, "new": 0}


def test_a_place_is_kept_until_its_receiver_takes_it_or_does_not_come_back() -> None:
    queue = shares(d0=3)
    queue.refused("d1", 0.0)
    queue.refused("d2", 0.0)
    queue.opened("d1-0", "d1")
    assert queue.num_kept("d0", 0.0) == 1
    queue.refused("d2", 5.0)
    assert queue.num_kept("d0", 4.9 + BACK_S) == 1
    assert queue.num_kept("d0", 5.1 + BACK_S) == 0
    queue.refused("d2", 50.0)
    assert queue.num_kept("d0", 50.0) == 1, "it has come back after all"


def test_prompts_whose_hand_off_is_over_are_not_here() -> None:
    queue = shares(d0=2, d1=1)
    queue.refused("d1", 0.0)
    queue.closed("d0-0")
    queue.closed("d0-0")
    queue.closed("unknown")
    assert queue.num_kept("d0", 0.0) == 0
    queue.closed("d1-0")
    assert queue.num_kept("d0", 0.0) == 1
    queue.closed("d0-1")
    assert queue.num_kept("d0", 0.0) == 0
    assert not queue._receivers
    assert not queue._num_here


class Prefill:
    """A prefill worker with four places in its queue, behind those that find a slot, and what it said last."""

    def __init__(self) -> None:
        self._world = World()
        limit = self._world.prefill.scheduler._arrivals._queue_limit
        limit._max_queue_len = 4
        self.num_taken = limit._table.slots.num_free + 4
        self._num_opened = 0
        self.said: Any = None

    def offer(self, receiver: str) -> HandoffId | None:
        """A prompt; None = it was refused."""
        self._num_opened += 1
        handoff = HandoffId(receiver, self._num_opened)
        opening = Open(request=request(receiver, (1, 2, 3), 4), held_tokens=0, backend="fake")
        self._world.prefill_role.handle(PeerOpened(handoff, opening, receiver, self), 0.0)
        return handoff if isinstance(self.said, Accepted) else None

    def end(self, handoff: HandoffId) -> None:
        """Its receiver wants it no more."""
        self._world.prefill_role.handle(PeerMessage(handoff, StreamEnded(reason="closed")), 0.0)

    def send(self, message: PrefillToDecode) -> None:
        """To a receiver."""
        self.said = message

    def close(self) -> None:
        """Nothing to close."""


def filled() -> tuple[Prefill, list[HandoffId]]:
    """With prompts of d0."""
    prefill = Prefill()
    taken = [handoff for _ in range(prefill.num_taken) if (handoff := prefill.offer("d0"))]
    assert len(taken) == prefill.num_taken
    assert prefill.offer("d0") is None
    return prefill, taken


def test_a_place_that_comes_free_in_a_full_queue_is_for_the_decode_worker_that_has_fewest_prompts_there() -> None:
    prefill, taken = filled()
    assert prefill.offer("d1") is None
    prefill.end(taken[0])
    assert prefill.offer("d0") is None
    assert isinstance(prefill.said, Refused)
    assert isinstance(prefill.said.error, Overloaded)
    assert "3 requests are waiting, max_queue_len is 4, and the last places are for others; retry" in str(prefill.said.error)
    assert prefill.offer("d1")
    prefill.end(taken[1])
    assert prefill.offer("d0"), "nobody else was refused since"


def test_no_more_than_half_of_a_full_queue_is_kept_for_those_that_may_come() -> None:
    prefill, taken = filled()
    for number in range(1, 8):
        assert prefill.offer(f"d{number}") is None
    for handoff in taken[:2]:
        prefill.end(handoff)
    assert prefill.offer("d0") is None
    prefill.end(taken[2])
    assert prefill.offer("d0")
    assert prefill.offer("d0") is None


def test_who_joins_others_that_wait_for_a_full_prefill_worker_is_served_as_they_are() -> None:
    world = World(num_decode=3, local_prefill=False)
    world.prefill.scheduler._arrivals._queue_limit._max_queue_len = 4
    waiting = [list[str](), [], []]
    served = [0, 0, 0]
    for tick in range(350):
        for number, mine in enumerate(waiting):
            done = [name for name in mine if world.outputs[name]]
            served[number] += len(done) if tick >= 150 else 0
            mine[:] = [name for name in mine if name not in done]
            if len(mine) < 12 and (number < 2 or tick >= 50):
                mine.append(f"r{len(world.outputs)}")
                world.submit(request(mine[-1], (len(world.outputs), *range(2, 41)), 1), to=number)
        world.tick()
        world.now_s += 0.1
    assert sum(served) == pytest.approx(200 * 12 / 40, abs=2), "its steps are full"
    assert min(served) > 0.7 * max(served), served
