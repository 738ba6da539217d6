"""What comes to D from one peer, over the one network that this worker has: how long it may take, and whether it comes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from jdisagg.handoff.messages import ChunkReady

FETCH_TIMEOUT_S = 5.0  # one piece, or as long as it and those before it take on the slowest network:
SLOWEST_BYTES_PER_S = 8 * 2**20  # from one peer, ..
SLOWEST_IN_ALL_BYTES_PER_S = 32 * 2**20  # .. and from all together
MOST_PATIENCE = 8  # times that
MOST_STALLS = 2  # fetches in a row on which nothing came: that backend brings nothing from there
LATE_S = 1.0  # without a piece, beside the time of one: another P is asked as well


@dataclass(slots=True)
class IncomingPiece:
    """An announced piece. `fetch_deadline_s` is None while no fetch is under way."""

    ready: ChunkReady
    fetch_deadline_s: float | None = None
    began_s: float = 0.0
    patience: int = 1  # of its line, when the fetch began
    is_hurried: bool = False  # the fetch has no more time than its request


@dataclass(slots=True)
class Inflow:
    """What comes from all peers, over the one network that this worker has."""

    queued_bytes: int = 0  # of pieces that are being fetched


@dataclass(slots=True, weakref_slot=True)
class Line:
    """What comes from one peer: piece after piece, whomever they are for."""

    peer: str
    inflow: Inflow
    queued_bytes: int = 0  # of pieces that are being fetched
    waiting_s: float | None = None  # since when for the next one of them; None = for none
    arrived_s: float = 0.0  # when one last came
    patience: int = 1  # twice as much after a time that was too short: a peer may have more receivers than SLOWEST_.. allows
    stalls: Counter[str] = field(default_factory=Counter)  # by backend: fetches that stalled since one last came

    def begin(self, piece: IncomingPiece, deadline_s: float, now_s: float) -> float:
        """Fetch the piece (again), by `deadline_s` at the latest: it gets a time of its own."""
        if piece.fetch_deadline_s is None:
            self._queue(piece.ready.num_bytes)
        if self.waiting_s is None:
            self.waiting_s = now_s
        piece.patience, piece.began_s = self.patience, now_s
        due_s = now_s + self.fetch_time_s
        piece.is_hurried, piece.fetch_deadline_s = deadline_s <= due_s, min(due_s, deadline_s)
        return piece.fetch_deadline_s

    def end(self, piece: IncomingPiece) -> None:
        """It is not being fetched any more; idempotent."""
        if piece.fetch_deadline_s is not None:
            self._queue(-piece.ready.num_bytes)
            piece.fetch_deadline_s = None
            if not self.queued_bytes:
                self.waiting_s = None

    def arrived(self, piece: ChunkReady, now_s: float) -> None:
        """A piece came, and was taken out of the queue."""
        self.arrived_s = now_s
        self.stalls.pop(piece.backend, None)
        if self.queued_bytes:
            self.waiting_s = now_s
        else:
            self.patience = 1

    def failed(self, piece: IncomingPiece, reason: str) -> None:
        """A fetch did. "slow": there was too little time; those that began with as much patience, and failed for the same
        lack of time, count once."""
        if reason == "stalled":
            self.stalls[piece.ready.backend] += 1
        elif reason == "slow" or (reason == "timeout" and self.arrived_s > piece.began_s):
            self.patience = max(self.patience, min(2 * piece.patience, MOST_PATIENCE))

    def is_dead(self, backend: str) -> bool:
        """Whether that brings nothing from there, try after try."""
        return self.stalls[backend] >= MOST_STALLS

    def late_s(self, num_bytes: int, now_s: float, patience: int = 1) -> float:
        """For how long no piece has come, if that is `patience` times too long for one of `num_bytes`; else 0.0."""
        idle_s = 0.0 if self.waiting_s is None else now_s - self.waiting_s
        return idle_s if idle_s >= patience * (LATE_S + num_bytes / SLOWEST_BYTES_PER_S) else 0.0

    def wait_anew(self, now_s: float) -> None:
        """Nobody is to be blamed for the time until now."""
        if self.waiting_s is not None:
            self.waiting_s = now_s

    @property
    def fetch_time_s(self) -> float:
        """For the last piece of its queue. Other peers' pieces share the network with it."""
        alone_s, shared_s = self.queued_bytes / SLOWEST_BYTES_PER_S, self.inflow.queued_bytes / SLOWEST_IN_ALL_BYTES_PER_S
        return max(FETCH_TIMEOUT_S, alone_s, shared_s) * self.patience

    def _queue(self, num_bytes: int) -> None:
        self.queued_bytes += num_bytes
        self.inflow.queued_bytes += num_bytes
