"""Threads of fetches: one per peer, and none for a peer that is long gone."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from jdisagg.handoff.messages import HandoffId
from jdisagg.transfer import lanes
from jdisagg.transfer.base import Piece, PieceArrived, PieceFailed, TransferEvent
from jdisagg.transfer.lanes import FetchJob, Lane, LaneFetcher
from jdisagg.transfer.target import PieceError
from tests.unit.transfer.lane_kit import NOTHING, READY, assert_set, threads_called
from tests.unit.waiting import until


def test_peers_that_come_back_elsewhere_leave_no_thread_behind_though_nothing_is_fetched_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "IDLE_S", 0.05)
    stuck, posted, ended = threading.Event(), queue.SimpleQueue[TransferEvent](), queue.SimpleQueue[str]()

    def obtain(job: FetchJob) -> Piece:
        if job.peer == "slow:1":
            stuck.wait(60.0)
        raise PieceError("connection", job.peer)

    fetches = LaneFetcher("test-leaving", obtain, posted.put, on_end=ended.put)
    fetches.fetch(HandoffId("slow", 0), "slow:1", READY, float("inf"))
    for serial in range(20):
        fetches.fetch(HandoffId("a", serial), f"restarted:{serial}", READY, float("inf"))
        assert posted.get(timeout=30.0).handoff == HandoffId("a", serial)
    until(lambda: len(threads_called("test-leaving")) == 1, "one by one they were idle")
    assert {ended.get(timeout=30.0) for _ in range(20)} == {f"restarted:{serial}" for serial in range(20)}
    stuck.set()
    assert posted.get(timeout=30.0).handoff == HandoffId("slow", 0), "a lane at work is not ended"
    until(lambda: not threads_called("test-leaving"), "the last one as well")
    fetches.close()


def test_more_peers_than_threads_may_wait_end_those_that_were_unused_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_LANES", 3)
    stuck, posted, ended = threading.Event(), queue.SimpleQueue[str](), queue.SimpleQueue[str]()

    def obtain(job: FetchJob) -> Piece:
        if job.peer == "slow:1":
            stuck.wait(60.0)
        return NOTHING

    fetches = LaneFetcher("test-many", obtain, lambda event: posted.put(event.handoff.request_id), on_end=ended.put)
    for peer in ("slow:1", "p:1", "q:1", "p:1", "r:1", "s:1"):
        fetches.fetch(HandoffId(peer, 0), peer, READY, float("inf"))
        if peer != "slow:1":
            assert posted.get(timeout=30.0) == peer
    assert ended.get(timeout=30.0) == "q:1", "p:1 was used again"
    until(lambda: len(threads_called("test-many")) == 4, "p:1, r:1, s:1 and the busy one")
    stuck.set()
    assert posted.get(timeout=30.0) == "slow:1", "it was told to end, and is through first"
    assert ended.get(timeout=30.0) == "slow:1"
    fetches.close()


def test_a_peer_that_had_to_make_room_keeps_its_connection_while_there_are_fetches_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that waits may have begun over it."""
    monkeypatch.setattr(lanes, "MAX_LANES", 1)
    stuck, posted, done = threading.Event(), queue.SimpleQueue[str](), list[str]()

    def obtain(job: FetchJob) -> Piece:
        if job.handoff.request_id == "first":
            assert_set(stuck)
        done.append(job.handoff.request_id)
        return NOTHING

    fetches = LaneFetcher("test", obtain, lambda event: posted.put(event.handoff.request_id), on_end=done.append)
    fetches.fetch(HandoffId("first", 0), "p:1", READY, float("inf"))
    fetches.fetch(HandoffId("elsewhere", 0), "q:1", READY, float("inf"))  # p:1 has to go, once it is through
    assert posted.get(timeout=30.0) == "elsewhere"
    fetches.fetch(HandoffId("second", 1), "p:1", READY, float("inf"))
    stuck.set()
    assert [posted.get(timeout=30.0), posted.get(timeout=30.0)] == ["first", "second"]
    assert done == ["elsewhere", "first", "second"]
    fetches.close()


def test_an_idle_lane_lets_go_of_its_peer_before_that_gets_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end must not take the connection that the next lane has made; a fetch that comes meanwhile is not lost."""
    monkeypatch.setattr(lanes, "IDLE_S", 0.05)
    ending, told, posted, done = threading.Event(), threading.Event(), queue.SimpleQueue[str](), list[str]()

    def disconnect(peer: str) -> None:
        if not ending.is_set():
            ending.set()
            told.wait(60.0)
        done.append("end")

    def obtain(job: FetchJob) -> Piece:
        done.append(job.handoff.request_id)
        return NOTHING

    fetches = LaneFetcher("test", obtain, lambda event: posted.put(event.handoff.request_id), on_end=disconnect)
    fetches.fetch(HandoffId("first", 0), "p:1", READY, float("inf"))
    assert ending.wait(30.0)
    fetches.fetch(HandoffId("second", 1), "p:1", READY, float("inf"))
    told.set()
    assert [posted.get(timeout=30.0), posted.get(timeout=30.0)] == ["first", "second"]
    assert done[:3] == ["first", "end", "second"]
    fetches.close()
    assert done[-1] == "end"


@pytest.mark.covers("X05")
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
    failed, arrived = posted.get(timeout=30.0), posted.get(timeout=30.0)
    why = ("checksum", "spoilt") if isinstance(error, PieceError) else ("device", repr(error))
    assert failed == PieceFailed(handoff=HandoffId("bad", 1), ready=READY, reason=why[0], detail=why[1])
    assert isinstance(arrived, PieceArrived)
    assert (arrived.handoff, arrived.ready) == (HandoffId("good", 1), READY)
    assert arrived.piece is NOTHING
    assert 0.0 <= arrived.seconds < 30.0
    assert threads[0] is threads[1], "one thread brought both"
    fetches.close()


def test_a_fetch_whose_deadline_has_passed_is_not_begun() -> None:
    """It waited behind others for too long."""
    posted, obtained = queue.SimpleQueue[TransferEvent](), list[FetchJob]()

    def obtain(job: FetchJob) -> Piece:
        obtained.append(job)
        return NOTHING

    fetches = LaneFetcher("test", obtain, posted.put)
    fetches.fetch(HandoffId("late", 1), "p:1", READY, 0.0)
    said = "the deadline passed before the fetch began"
    assert posted.get(timeout=30.0) == PieceFailed(handoff=HandoffId("late", 1), ready=READY, reason="timeout", detail=said)
    assert obtained == []
    fetches.close()


def test_few_peers_keep_their_threads_and_connections() -> None:
    posted, ended = queue.SimpleQueue[TransferEvent](), list[str]()
    fetches = LaneFetcher("test", lambda job: NOTHING, posted.put, on_end=ended.append)
    for peer in ("p:1", "q:1", "p:1", "q:1"):
        fetches.fetch(HandoffId("r", 1), peer, READY, float("inf"))
        assert isinstance(posted.get(timeout=30.0), PieceArrived)
    assert ended == []
    fetches.close()
    assert sorted(ended) == ["p:1", "q:1"]


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
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_runs_at_once_finds_all_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the thread uses is made after it was started."""
    monkeypatch.setattr(lanes.threading, "Thread", EagerThread)
    done = queue.SimpleQueue[str]()
    lane = Lane("test-eager")
    lane.submit(lambda: done.put("job"))
    assert done.get(timeout=30.0) == "job"
    lane.stop()
    posted = queue.SimpleQueue[TransferEvent]()
    fetches = LaneFetcher("test", lambda job: NOTHING, posted.put, on_end=done.put)
    fetches.fetch(HandoffId("r", 1), "p:1", READY, float("inf"))
    assert isinstance(posted.get(timeout=30.0), PieceArrived)
    fetches.close()
    assert done.get(timeout=30.0) == "p:1"


class ImmediateLane:
    """As fast as a thread can be: a job is over before `submit` returns."""

    def __init__(self, name: str, on_idle: Callable[[], None]) -> None:
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
    assert fetches._unfinished() == []
    fetches.close()
    assert [type(event) for event in posted] == kind


def test_a_lane_that_cannot_start_fails_its_fetch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    posted = queue.SimpleQueue[TransferEvent]()
    fetches = LaneFetcher("test", lambda job: NOTHING, posted.put)

    def no_thread(name: str, on_idle: Callable[[], None]) -> Lane:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(lanes, "Lane", no_thread)
        fetches.fetch(HandoffId("a", 0), "p:1", READY, float("inf"))
    failed = posted.get(timeout=30.0)
    assert failed == PieceFailed(handoff=HandoffId("a", 0), ready=READY, reason="connection", detail="can't start new thread")
    fetches.fetch(HandoffId("b", 0), "p:1", READY, float("inf"))
    assert posted.get(timeout=30.0).handoff == HandoffId("b", 0)
    fetches.close()


@pytest.mark.covers("X06")
def test_a_fetcher_that_closes_waits_for_no_thread_posts_nothing_and_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "CLOSE_TIMEOUT_S", 0.05)
    stuck, begun, posted = threading.Event(), threading.Event(), queue.SimpleQueue[TransferEvent]()
    obtained = list[str]()

    def obtain(job: FetchJob) -> Piece:
        obtained.append(job.handoff.request_id)
        begun.set()
        assert_set(stuck)
        return NOTHING

    fetches = LaneFetcher("test-closing", obtain, posted.put)
    for name in ("under way", "queued"):
        fetches.fetch(HandoffId(name, 1), "p:1", READY, float("inf"))
    assert begun.wait(30.0)
    fetches.close()
    fetches.fetch(HandoffId("late", 1), "p:1", READY, float("inf"))
    refused = PieceFailed(handoff=HandoffId("late", 1), ready=READY, reason="connection", detail="the fetcher is closed")
    assert posted.get(timeout=30.0) == refused
    stuck.set()
    until(lambda: not threads_called("test-closing"), "its thread ends")
    assert (obtained, posted.empty(), fetches._unfinished()) == (["under way"], True, [])


def test_behind_a_fetch_are_those_of_its_peer_that_came_later() -> None:
    stuck, jobs, behind = threading.Event(), dict[str, FetchJob](), dict[str, list[str]]()

    def obtain(job: FetchJob) -> Piece:
        name = job.handoff.request_id
        if name == "first":
            assert_set(stuck)
        jobs[name] = job
        behind[name] = [one.handoff.request_id for one in job.behind()]
        return NOTHING

    fetches = LaneFetcher("test-behind", obtain, lambda event: None)
    for name, peer in (("first", "p:1"), ("elsewhere", "q:1"), ("second", "p:1"), ("third", "p:1")):
        fetches.fetch(HandoffId(name, 1), peer, READY, float("inf"))
    until(lambda: "elsewhere" in behind, "it has a thread of its own")
    stuck.set()
    until(lambda: fetches._unfinished() == [], "all are through")
    assert behind == {"first": ["second", "third"], "elsewhere": [], "second": ["third"], "third": []}
    assert list(jobs["first"].behind()) == [], "it is over"
    fetches.close()


def test_to_look_behind_a_fetch_takes_no_longer_where_other_peers_have_many() -> None:
    """A lane of backend jax that waits looks every 0.5 ms: 57 us each with 2,048 fetches were a tenth of the interpreter."""
    stuck, begun, looks = threading.Event(), threading.Event(), list[str]()

    class Peer(str):
        """Notes each comparison with another one."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            looks.append(str(other))
            return str.__eq__(self, other)

    def obtain(job: FetchJob) -> Piece:
        if job.peer == "p:1":
            looks.clear()
            behind.extend(one.handoff.request_id for one in job.behind())
            looked.append(len(looks))
            begun.set()
        assert_set(stuck)
        return NOTHING

    behind, looked = list[str](), list[int]()
    fetches = LaneFetcher("test-looking", obtain, lambda event: None)
    for serial in range(200):
        fetches.fetch(HandoffId(f"q{serial}", 1), Peer("q:1"), READY, float("inf"))
    fetches.fetch(HandoffId("r", 1), "p:1", READY, float("inf"))
    assert begun.wait(30.0)
    assert (behind, looked) == ([], [0])
    stuck.set()
    fetches.close()
