"""Pieces that wait for their engine lie beside its pool, each as large as a whole chunk: there are only so many of them."""

from __future__ import annotations

import queue
import threading
from time import monotonic, sleep

import numpy as np
import pytest

from jdisagg.handoff.messages import HandoffId
from jdisagg.transfer.base import Piece, PieceArrived, PieceFailed, TransferEvent
from jdisagg.transfer.lanes import FetchJob, LaneFetcher
from tests.unit.transfer.lane_kit import READY
from tests.unit.transfer.rig import H, Rig, piece, tokens


def never_comes(events: queue.SimpleQueue[TransferEvent]) -> bool:
    sleep(0.1)
    return events.empty()


@pytest.mark.parametrize("kind", ["grpc", "tcp", "shm", "jax", "device_put"])
def test_the_next_piece_comes_when_the_engine_has_taken_one(kind: str) -> None:
    rig = Rig(kind).start(most_waiting=1)
    first, second = (rig.published(key, piece(tokens(1))) for key in ("a", "b"))
    for ready in (first, second):
        rig.fetcher.fetch(H, rig.peer, ready, monotonic() + 60.0)
    arrived = rig.events.get(timeout=30.0)
    assert isinstance(arrived, PieceArrived)
    assert arrived.ready == first
    assert never_comes(rig.events), "one waits already"
    del arrived
    assert isinstance(following := rig.events.get(timeout=30.0), PieceArrived)
    assert following.ready == second
    rig.close()


def small(job: FetchJob) -> Piece:
    return Piece(begin=0, end=1, data=np.zeros(1))


def test_a_peer_that_is_slow_keeps_no_room_from_others() -> None:
    posted, slow = queue.SimpleQueue[TransferEvent](), threading.Event()

    def obtain(job: FetchJob) -> Piece:
        if job.peer == "slow:1":
            slow.wait(60.0)
        return small(job)

    fetches = LaneFetcher("test", obtain, posted.put, most_waiting=1)
    for peer in ("slow:1", "quick:1", "quick:1"):
        fetches.fetch(HandoffId(peer, 1), peer, READY, monotonic() + 60.0)
    for _ in range(2):
        assert posted.get(timeout=30.0).handoff.request_id == "quick:1"
    slow.set()
    fetches.close()


def test_a_fetch_that_waits_for_the_engine_ends_with_its_time() -> None:
    posted = queue.SimpleQueue[TransferEvent]()
    fetches = LaneFetcher("test", small, posted.put, most_waiting=1)
    fetches.fetch(HandoffId("first", 1), "p:1", READY, monotonic() + 60.0)
    first = posted.get(timeout=30.0)
    fetches.fetch(HandoffId("late", 1), "p:1", READY, monotonic() + 0.05)
    late = posted.get(timeout=30.0)
    assert isinstance(late, PieceFailed)
    assert (late.handoff.request_id, late.reason) == ("late", "timeout")
    assert isinstance(first, PieceArrived)
    fetches.close()


def test_closing_waits_for_no_engine() -> None:
    posted = queue.SimpleQueue[TransferEvent]()
    fetches = LaneFetcher("test", small, posted.put, most_waiting=1)
    for name in ("first", "second"):
        fetches.fetch(HandoffId(name, 1), "p:1", READY, monotonic() + 60.0)
    first = posted.get(timeout=30.0)
    began_s = monotonic()
    fetches.close()
    assert monotonic() - began_s < 1.0
    assert isinstance(first, PieceArrived)
    assert posted.empty()
