"""Threads of fetches: one per peer, and none for a peer that is long gone."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.transfer import lanes
from jdisagg.transfer.base import Piece, PieceArrived, PieceFailed, TransferEvent
from jdisagg.transfer.lanes import FetchJob, Lane, LaneFetcher
from jdisagg.transfer.target import PieceError

NOTHING = Piece(begin=0, end=1, data=cast(Any, None))
READY = ChunkReady(key="k", begin=0, end=1, shape=(1, 1, 1, 1), dtype="float32", num_bytes=4, checksum=0)


@pytest.mark.timeout(10)
def test_a_job_that_raises_is_in_the_log_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    lane, ran = Lane("lane"), threading.Event()

    def freeing() -> None:
        raise OSError("no memory for the file's end")

    lane.submit(freeing)
    lane.submit(ran.set)
    assert ran.wait(5.0)
    lane.stop()
    lane.join(5.0)
    assert "no memory" in caplog.text


@pytest.mark.timeout(10)
def test_peers_that_come_back_elsewhere_leave_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "IDLE_LANE_S", 0.0)
    stuck, posted = threading.Event(), queue.SimpleQueue[TransferEvent]()

    def obtain(job: FetchJob) -> None:
        if job.peer == "slow:1":
            stuck.wait(5.0)
        raise PieceError("connection", job.peer)

    fetches = LaneFetcher("test", obtain, posted.put)  # type: ignore[arg-type]
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


@pytest.mark.timeout(20)
def test_the_end_of_an_idle_lane_is_over_when_the_next_one_of_its_peer_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lets go of the peer's connection, which must not be the one that the next lane has made."""
    monkeypatch.setattr(lanes, "IDLE_LANE_S", 0.0)
    told, posted, done = threading.Event(), queue.SimpleQueue[str](), list[tuple[str, str]]()

    def post(event: TransferEvent) -> None:
        posted.put(event.handoff.request_id)
        if event.handoff.request_id == "first":
            told.wait(10.0)  # the engine's inbox is locked, say: its lane has no job any more, and is not over

    def obtain(job: FetchJob) -> Piece:
        done.append((job.peer, job.handoff.request_id))
        return NOTHING

    fetches = LaneFetcher("test", obtain, post, on_end=lambda peer: done.append((peer, "end")))
    for number, (name, peer) in enumerate([("first", "p:1"), ("other", "q:1"), ("second", "p:1")]):
        fetches.fetch(HandoffId(name, number), peer, READY, float("inf"))
        if name != "second":
            assert posted.get(timeout=5.0) == name
    time.sleep(0.1)
    told.set()
    assert posted.get(timeout=5.0) == "second"
    fetches.close()
    assert [what for peer, what in done if peer == "p:1"] == ["first", "end", "second", "end"]


@pytest.mark.covers("X05")
@pytest.mark.timeout(10)
@pytest.mark.parametrize("error", [NameError("executor"), PieceError("checksum", "spoilt"), MemoryError(), KeyError("peer")])
def test_whatever_a_fetch_raises_costs_its_piece_and_the_same_thread_brings_the_next(error: Exception) -> None:
    posted, threads = queue.SimpleQueue[TransferEvent](), list[threading.Thread]()

    def obtain(job: FetchJob) -> Piece:
        threads.append(threading.current_thread())
        if job.handoff.request_id == "bad":
            raise error
        return NOTHING

    fetches = LaneFetcher("test", obtain, posted.put)
    for name in ("bad", "good"):
        fetches.fetch(HandoffId(name, 1), "p:1", READY, float("inf"))
    failed, arrived = posted.get(timeout=5.0), posted.get(timeout=5.0)
    assert isinstance(failed, PieceFailed)
    assert (failed.handoff.request_id, failed.reason) == ("bad", "checksum" if isinstance(error, PieceError) else "device")
    assert isinstance(arrived, PieceArrived)
    assert arrived.handoff.request_id == "good"
    assert threads[0] is threads[1], "one thread brought both"
    fetches.close()


class EagerThread(threading.Thread):
    """One whose `start` returns only once the new thread waits for something, or has died."""

    died: BaseException | None = None

    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:
            self.died = error
            raise

    def start(self) -> None:
        super().start()
        self.join(0.1)


@pytest.mark.covers("X06")
@pytest.mark.timeout(10)
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_runs_at_once_finds_all_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the thread uses is made after it was started."""
    monkeypatch.setattr(lanes.threading, "Thread", EagerThread)
    done = queue.SimpleQueue[str]()
    lane = Lane("test-eager")
    lane.submit(lambda: done.put("job"))
    assert done.get(timeout=5.0) == "job"
    lane.stop()
    posted = queue.SimpleQueue[TransferEvent]()
    fetches = LaneFetcher("test", lambda job: NOTHING, posted.put, on_end=done.put)
    fetches.fetch(HandoffId("r", 1), "p:1", READY, float("inf"))
    assert isinstance(posted.get(timeout=5.0), PieceArrived)
    fetches.close()
    assert done.get(timeout=5.0) == "p:1"


class ImmediateLane:
    """As fast as a thread can be: a job is over before `submit` returns."""

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, job: Callable[[], None]) -> None:
        job()

    def stop(self) -> None:
        """No thread."""

    def join(self, timeout_s: float) -> None:
        """No thread."""


@pytest.mark.covers("X09")
@pytest.mark.parametrize("outcome", ["arrives", "fails", "is cancelled"])
def test_a_fetch_that_is_over_before_it_was_noted_down_stays_over(monkeypatch: pytest.MonkeyPatch, outcome: str) -> None:
    monkeypatch.setattr(lanes, "Lane", ImmediateLane)
    posted: list[TransferEvent] = []

    def obtain(job: FetchJob) -> Piece:
        if outcome == "is cancelled":
            fetches.cancel(job.handoff)
        if outcome == "fails":
            raise PieceError("connection", "gone")
        return NOTHING

    fetches = LaneFetcher("test", obtain, posted.append)
    fetches.fetch(HandoffId("r", 1), "p:1", READY, float("inf"))
    kind = {"arrives": [PieceArrived], "fails": [PieceFailed], "is cancelled": []}[outcome]
    assert [type(event) for event in posted] == kind
    assert fetches.num_jobs == 0
    fetches.close()
    assert [type(event) for event in posted] == kind


@pytest.mark.timeout(10)
def test_what_a_job_held_is_free_while_the_lane_waits_for_the_next() -> None:
    lane, ran, piece = Lane("test"), threading.Event(), np.zeros(4)
    held = weakref.ref(piece)
    lane.submit(lambda piece=piece: ran.set())
    del piece
    assert ran.wait(5.0)
    until_s = time.monotonic() + 5.0
    while held() is not None and time.monotonic() < until_s:
        time.sleep(0.005)
    assert held() is None
    lane.stop()


def test_a_lane_that_cannot_start_fails_its_fetch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    posted = queue.SimpleQueue[TransferEvent]()
    fetches = LaneFetcher("test", lambda job: NOTHING, posted.put)

    def no_thread(name: str) -> Lane:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(lanes, "Lane", no_thread)
        fetches.fetch(HandoffId("a", 0), "p:1", READY, float("inf"))
    failed = posted.get(timeout=5.0)
    assert isinstance(failed, PieceFailed)
    assert (failed.reason, failed.detail) == ("connection", "can't start new thread")
    fetches.fetch(HandoffId("b", 0), "p:1", READY, float("inf"))
    assert posted.get(timeout=5.0).handoff == HandoffId("b", 0)
    fetches.close()
