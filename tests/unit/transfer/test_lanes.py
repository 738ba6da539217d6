"""Threads of fetches: one per peer, and none for a peer that is long gone."""

from __future__ import annotations

import queue
import threading

import pytest

from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.transfer import lanes
from jdisagg.transfer.base import TransferEvent
from jdisagg.transfer.lanes import FetchJob, FetchLanes
from jdisagg.transfer.target import PieceError

READY = ChunkReady(key="k", begin=0, end=1, shape=(1, 1, 1, 1), dtype="float32", num_bytes=4, checksum=0)


@pytest.mark.timeout(10)
def test_peers_that_come_back_elsewhere_leave_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "IDLE_LANE_S", 0.0)
    stuck, posted = threading.Event(), queue.SimpleQueue[TransferEvent]()

    def obtain(job: FetchJob) -> None:
        if job.peer == "slow:1":
            stuck.wait(5.0)
        raise PieceError("connection", job.peer)

    fetches = FetchLanes("test", obtain, posted.put)  # type: ignore[arg-type]
    fetches.fetch(HandoffId("slow", 0), "slow:1", READY, float("inf"))
    for serial in range(20):
        fetches.fetch(HandoffId("a", serial), f"restarted:{serial}", READY, float("inf"))
        assert posted.get(timeout=5.0).handoff == HandoffId("a", serial)
    assert fetches.num_lanes <= 3, "the busy one, the last one, and one whose job may just be ending"
    stuck.set()
    assert posted.get(timeout=5.0).handoff == HandoffId("slow", 0), "a lane at work is not ended"
    fetches.close()
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("test-") and not thread.join(2.0) and thread.is_alive()
    ]
