"""Threads that transfer. A Lane runs jobs one after the other; LaneFetcher gives every peer a lane, until it is idle.

One stalled peer must not hold up the others, and on some devices a connection belongs to its thread: hence a thread per
peer. A job that raises fails its piece alone; the thread goes on.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, sleep

from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.transfer.base import Piece, PieceArrived, PieceFailed, Post
from jdisagg.transfer.room import Room, Taken
from jdisagg.transfer.target import PieceError

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 5.0
IDLE_S = 10.0  # without a piece: a peer's thread ends, and its transfer server. Peers that restart come back under new
# addresses; to begin anew costs 2 ms
LOOK_S = 1e-3  # between two looks whether the engine has taken what came
MAX_LANES = 64  # of a fetcher; the longest unused ones end beyond it, once they are through


class Lane:
    """One daemon thread and its queue."""

    def __init__(self, name: str, on_idle: Callable[[], None] = lambda: None) -> None:
        """`on_idle` is a job for whenever there was none for IDLE_S; it may stop the lane."""
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._on_idle = on_idle
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after those submitted before; it must report its own failures. What it raises is in the log."""
        self._queue.put(job)

    def stop(self) -> None:
        """Let the thread end after the jobs already submitted; does not wait."""
        self._queue.put(None)

    @property
    def has_jobs(self) -> bool:
        """Whether jobs wait for the one that runs."""
        return not self._queue.empty()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread; says so in the log when it is still busy."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("transfer thread %s did not end within %.1f s", self._thread.name, timeout_s)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:  # without its thread every later job would wait for ever
                log.exception("transfer thread %s", self._thread.name)
            del job  # and what it holds: the next one may be long in coming

    def _next(self) -> Callable[[], None] | None:
        try:
            return self._queue.get(timeout=IDLE_S)
        except queue.Empty:
            return self._on_idle


@dataclass(slots=True, eq=False)
class FetchJob:
    """One piece to get. `cancelled` is set by the engine thread and read by the lane."""

    handoff: HandoffId
    peer: str
    ready: ChunkReady
    deadline_s: float
    queued: deque[FetchJob] = field(repr=False)  # of its peer, in the order of its lane: those that are not through
    cancelled: bool = False
    begun: object | None = None  # what a backend has that begins before the job's turn has come
    num_tokens: int | None = None  # that it takes on the device from then on, once somebody has looked
    waited_s: float = 0.0  # for room

    def behind(self) -> Iterator[FetchJob]:
        """The fetches from its peer that wait for it, in order; none for one that does not run. For its own lane, and those
        that wait look often: no more are walked than it takes, and none of other peers."""
        if self.queued and self.queued[0] is self:
            for index in range(1, len(self.queued)):  # by index: meanwhile there may be new ones
                yield self.queued[index]

    def await_room(self, room: Room, num_tokens: int) -> Taken:
        """Wait for it, on the job's lane: until the engine has taken what waits for it. Raises PieceError("connection" |
        "timeout") when the job is cancelled or its time is over."""
        began_s = monotonic()
        while (taken := room.take(num_tokens)) is None:
            if self.cancelled:
                raise PieceError("connection", "cancelled")
            if monotonic() >= self.deadline_s:
                raise PieceError("timeout", "the deadline passed before there was room on the device")
            sleep(LOOK_S)
        self.waited_s = monotonic() - began_s
        return taken


class LaneFetcher:
    """A backend's Fetcher: runs `obtain(job)` on the lane of the job's peer and posts what came of it.

    `obtain` takes room for the piece and returns it placed, or raises PieceError; one that takes its time looks at
    `job.cancelled` now and then.
    fetch and cancel are for the engine thread and never wait for a transfer; close is for whoever has stopped that one, and
    waits for the threads to end.
    """

    def __init__(
        self,
        name: str,
        obtain: Callable[[FetchJob], Piece],
        post: Post,
        *,
        on_end: Callable[[str], None] = lambda peer: None,
    ) -> None:
        """`name`: the backend's; `on_end(peer)` runs on the peer's lane when that is idle, and before it ends."""
        self.name = name
        self._obtain = obtain
        self._post = post
        self._on_end = on_end
        self._lanes: dict[str, Lane] = {}  # longest unused first
        self._lock = threading.Lock()  # of these: whoever finds a lane submits to it before it can end
        self._jobs: dict[str, deque[FetchJob]] = {}  # by peer, in the order of its lane; there as long as that is. Written
        # here, popped by lanes: single operations only
        self._closed = False

    def fetch(self, handoff: HandoffId, peer: str, ready: ChunkReady, deadline_s: float) -> None:
        """Queue one piece."""
        if self._closed:
            self._post(PieceFailed(handoff=handoff, ready=ready, reason="connection", detail="the fetcher is closed"))
            return
        try:
            with self._lock:
                lane, queued = self._lane(peer), self._jobs.setdefault(peer, deque())
                job = FetchJob(handoff, peer, ready, deadline_s, queued)
                queued.append(job)
                lane.submit(partial(self._run, job))
        except RuntimeError as error:  # no thread is left
            self._post(PieceFailed(handoff=handoff, ready=ready, reason="connection", detail=str(error)))

    def cancel(self, handoff: HandoffId) -> None:
        """Drop the results of every fetch of `handoff` that has not been posted yet."""
        for job in self._unfinished():
            if job.handoff == handoff:
                job.cancelled = True

    def close(self) -> None:
        """Cancel everything and end the threads."""
        self._closed = True
        for job in self._unfinished():
            job.cancelled = True
        with self._lock:
            lanes, self._lanes = self._lanes, {}
        for peer, lane in lanes.items():
            lane.submit(partial(self._on_end, peer))
            lane.stop()
        for lane in lanes.values():
            lane.join(CLOSE_TIMEOUT_S)

    def _unfinished(self) -> list[FetchJob]:
        return [job for queued in list(self._jobs.values()) for job in list(queued)]

    def _lane(self, peer: str) -> Lane:
        """The peer's, started if there is none."""
        lane = self._lanes.pop(peer, None)
        if lane is None:
            lane = Lane(f"{self.name}-fetch-{peer}", partial(self._leave, peer))
            num_surplus = max(0, len(self._lanes) + 1 - MAX_LANES)
            for unused in list(self._lanes)[:num_surplus]:
                self._lanes[unused].submit(partial(self._leave, unused))
        self._lanes[peer] = lane
        return lane

    def _leave(self, peer: str) -> None:
        """On the peer's lane: end it, unless there is a new fetch, which may have begun over the connection already. That goes
        first, so that the peer's next lane finds nothing of this one."""
        with self._lock:
            lane = self._lanes.get(peer)
            if lane is None or lane.has_jobs:
                return
        self._on_end(peer)
        with self._lock:
            if self._lanes.get(peer) is lane and not lane.has_jobs:
                del self._lanes[peer]
                self._jobs.pop(peer, None)
                lane.stop()

    def _run(self, job: FetchJob) -> None:
        try:
            event = None if job.cancelled else self._outcome(job)
        finally:
            job.queued.popleft()
        if event is not None and not job.cancelled:
            self._post(event)

    def _outcome(self, job: FetchJob) -> PieceArrived | PieceFailed:
        started_s = monotonic()
        try:
            if started_s >= job.deadline_s:
                was = "before the fetch began" if job.begun is None else "while it was on its way, behind others"
                raise PieceError("timeout", f"the deadline passed {was}")
            piece = self._obtain(job)
        except PieceError as error:
            return PieceFailed(handoff=job.handoff, ready=job.ready, reason=error.reason, detail=error.detail)
        except Exception as error:  # whatever it is, it concerns this piece; the lane serves the next one
            log.exception("fetch of piece %s from %s", job.ready.key, job.peer)
            return PieceFailed(handoff=job.handoff, ready=job.ready, reason="device", detail=repr(error))
        ended_s, ready = monotonic(), job.ready
        seconds = ended_s - started_s - job.waited_s
        log.debug(
            "request %s: piece [%d, %d), %d bytes, fetched from %.6f to %.6f",
            *(job.handoff.request_id, ready.begin, ready.end, ready.num_bytes, ended_s - seconds, ended_s),
        )
        return PieceArrived(handoff=job.handoff, ready=ready, piece=piece, seconds=seconds)
