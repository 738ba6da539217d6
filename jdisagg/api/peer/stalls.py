"""Ends calls on which nothing comes any more: a blocking read of a gRPC stream has no time-out but that of the whole call."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import grpc

LOOKS_PER_LIMIT = 8


@dataclass(slots=True, eq=False)
class Watched:
    """One call while it is read; its reader counts what comes."""

    call: grpc.Call
    most_silent_looks: int
    num_parts: int = 0  # the reader's
    has_paused: bool = False  # nothing came for half the limit
    has_stalled: bool = False  # it was ended
    num_seen: int = 0  # these two the watching thread's
    num_silent_looks: int = 0


class StallWatch:
    """One thread that looks at all calls, and ends when it finds none. `watch` and `unwatch` are for any thread."""

    def __init__(self, limit_s: float) -> None:
        """A stall is `limit_s` without a part, counted by this thread's own looks: a process that stood still blames nobody."""
        self.limit_s = limit_s
        self._watched: set[Watched] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, call: grpc.Call, *, patience: int = 1) -> Watched:
        """Begin; `unwatch` must follow. `patience`: how many times the limit the call gets. Raises RuntimeError when no thread
        is left."""
        watched = Watched(call, patience * LOOKS_PER_LIMIT)
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                thread = threading.Thread(target=self._run, name="stall-watch", daemon=True)
                thread.start()
                self._thread = thread
            self._watched.add(watched)
        return watched

    def unwatch(self, watched: Watched) -> None:
        """Its reader is through with it; idempotent."""
        with self._lock:
            self._watched.discard(watched)

    def close(self) -> None:
        """End the thread."""
        self._closing.set()

    def _run(self) -> None:
        while self._has_work():
            self._closing.wait(self.limit_s / LOOKS_PER_LIMIT)
            self._look()

    def _has_work(self) -> bool:
        with self._lock:
            if self._closing.is_set() or not self._watched:
                self._thread = None  # the next call starts another one
                return False
            return True

    def _look(self) -> None:
        with self._lock:
            watched = list(self._watched)
        for one in watched:
            if one.num_parts != one.num_seen:
                one.num_seen, one.num_silent_looks = one.num_parts, 0
                continue
            one.num_silent_looks += 1
            one.has_paused |= 2 * one.num_silent_looks >= LOOKS_PER_LIMIT
            if one.num_silent_looks >= one.most_silent_looks:
                one.has_stalled = True
                one.call.cancel()
