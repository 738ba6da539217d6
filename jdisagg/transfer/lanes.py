"""Threads that transfer. A Lane runs jobs one after the other; LaneFetcher gives every peer a lane of its own.

One stalled peer must not hold up the others, and on some devices a connection belongs to its thread: hence a thread per
peer. A job that raises fails its piece alone; the thread goes on.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.transfer.base import Piece, PieceArrived, PieceFailed, Post
from jdisagg.transfer.target import PieceError

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 5.0
IDLE_LANE_S = 60.0  # a peer's thread ends after so long without a fetch: peers that restart come back under new addresses


class Lane:
    """One daemon thread and its queue."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after those submitted before; it must report its own failures. What it raises is in the log."""
        self._queue.put(job)

    def stop(self) -> None:
        """Let the thread end after the jobs already submitted; does not wait."""
        self._queue.put(None)

    @property
    def is_alive(self) -> bool:
        """False once the last job is over and the thread has ended."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread; says so in the log when it is still busy."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("transfer thread %s did not end within %.1f s", self._thread.name, timeout_s)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except Exception:  # without its thread every later job would wait for ever
                log.exception("transfer thread %s", self._thread.name)
            del job  # and what it holds: the next one may be long in coming


@dataclass(slots=True, eq=False)
class FetchJob:
    """One piece to get. `cancelled` is set by the engine thread and read by the lane."""

    handoff: HandoffId
    peer: str
    ready: ChunkReady
    deadline_s: float
    cancelled: bool = False


class LaneFetcher:
    """A backend's Fetcher: runs `obtain(job)` on the lane of the job's peer and posts what came of it.

    `obtain` returns the placed piece or raises PieceError; one that takes its time looks at `job.cancelled` now and then.
    fetch, cancel and close are for the engine thread and never wait for a transfer (close waits for the threads to end).
    """

    def __init__(
        self,
        name: str,
        obtain: Callable[[FetchJob], Piece],
        post: Post,
        *,
        on_end: Callable[[str], None] = lambda peer: None,
    ) -> None:
        """`name`: the backend's; `on_end(peer)` is the last thing a lane runs, before the peer's next lane begins."""
        self.name = name
        self._obtain = obtain
        self._post = post
        self._on_end = on_end
        self._lanes: dict[str, Lane] = {}
        self._used_s: dict[str, float] = {}  # per lane, when it last got a job
        self._ending: dict[str, Lane] = {}  # idle ones that were told to end
        self._jobs: dict[int, FetchJob] = {}  # written here, popped by lanes: single dict operations only
        self._ids = itertools.count()
        self._closed = False

    def fetch(self, handoff: HandoffId, peer: str, ready: ChunkReady, deadline_s: float) -> None:
        """Queue one piece."""
        if self._closed:
            self._post(PieceFailed(handoff=handoff, ready=ready, reason="connection", detail="the fetcher is closed"))
            return
        now_s = monotonic()
        if peer not in self._lanes:
            self._end_idle_lanes(now_s)
            try:
                lane = self._lanes[peer] = Lane(f"{self.name}-fetch-{peer}")
            except RuntimeError as error:  # no thread is left
                self._post(PieceFailed(handoff=handoff, ready=ready, reason="connection", detail=str(error)))
                return
            if (former := self._ending.get(peer)) is not None:
                lane.submit(lambda: former.join(CLOSE_TIMEOUT_S))
        self._used_s[peer] = now_s
        job_id, job = next(self._ids), FetchJob(handoff, peer, ready, deadline_s)
        self._jobs[job_id] = job
        self._lanes[peer].submit(lambda: self._run(job_id, job))

    def cancel(self, handoff: HandoffId) -> None:
        """Drop the results of every fetch of `handoff` that has not been posted yet."""
        for job in list(self._jobs.values()):
            if job.handoff == handoff:
                job.cancelled = True

    @property
    def num_jobs(self) -> int:
        """Fetches queued or under way."""
        return len(self._jobs)

    def close(self) -> None:
        """Cancel everything and end the threads."""
        self._closed = True
        for job in list(self._jobs.values()):
            job.cancelled = True
        for peer, lane in self._lanes.items():
            self._stop(peer, lane)
        for lane in self._lanes.values():
            lane.join(CLOSE_TIMEOUT_S)
        self._lanes.clear()

    @property
    def num_lanes(self) -> int:
        """Threads."""
        return len(self._lanes)

    def _end_idle_lanes(self, now_s: float) -> None:
        self._ending = {peer: lane for peer, lane in self._ending.items() if lane.is_alive}
        busy = {job.peer for job in list(self._jobs.values())}
        for peer in [peer for peer, used_s in self._used_s.items() if now_s - used_s > IDLE_LANE_S and peer not in busy]:
            del self._used_s[peer]
            self._ending[peer] = self._lanes.pop(peer)
            self._stop(peer, self._ending[peer])

    def _stop(self, peer: str, lane: Lane) -> None:
        lane.submit(lambda: self._on_end(peer))
        lane.stop()

    def _run(self, job_id: int, job: FetchJob) -> None:
        try:
            event = None if job.cancelled else self._outcome(job)
        finally:
            self._jobs.pop(job_id, None)
        if event is not None and not job.cancelled:
            self._post(event)

    def _outcome(self, job: FetchJob) -> PieceArrived | PieceFailed:
        started_s = monotonic()
        try:
            if started_s >= job.deadline_s:
                raise PieceError("timeout", "the deadline passed before the fetch began")
            piece = self._obtain(job)
        except PieceError as error:
            return PieceFailed(handoff=job.handoff, ready=job.ready, reason=error.reason, detail=error.detail)
        except Exception as error:  # whatever it is, it concerns this piece; the lane serves the next one
            log.exception("fetch of piece %s from %s", job.ready.key, job.peer)
            return PieceFailed(handoff=job.handoff, ready=job.ready, reason="device", detail=repr(error))
        ended_s, ready = monotonic(), job.ready
        log.debug(
            "request %s: piece [%d, %d), %d bytes, fetched from %.6f to %.6f",
            *(job.handoff.request_id, ready.begin, ready.end, ready.num_bytes, started_s, ended_s),
        )
        return PieceArrived(handoff=job.handoff, ready=ready, piece=piece, seconds=ended_s - started_s)
