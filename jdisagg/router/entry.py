"""One worker process as the router knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jdisagg.core.fleet import Key, Member
from jdisagg.core.requests import Role
from jdisagg.router.worker_cache import WorkerCache


@dataclass(slots=True)
class RunStream:
    """Its Run stream stands. See `silence`."""

    since_s: float
    steady_s: float  # from then on it can go on with the requests of silent ones
    quiet_s: float | None = None  # since when nothing was heard; None: it is heard
    is_awaited: bool = False  # silent for longer than makes dead: nothing new is given to it


@dataclass(slots=True)
class Reach:
    """What came of opening its Run stream."""

    had_stream: bool = False  # one stood, or stands
    retry_at_s: float = 0.0  # no new one is tried before
    misses: int = 0  # attempts in a row that failed
    missing_since_s: float = 0.0  # the first of them
    why_not: str = ""  # what its operator should know


@dataclass(slots=True)
class Entry:
    """One worker process."""

    member: Member
    last_seen_s: float
    stream: RunStream | None = None  # None: it has none, or it was not answered yet
    pending: int = 0  # our requests on it; for P: those that named it first and have no token yet
    pending_tokens: int = 0  # of P: in the prompts of those
    pending_cached: int = 0  # of P: of these, those that it may have cached
    others: int = 0  # requests on it that are not ours, as it last told
    others_tokens: int = 0  # of P: what it has to compute besides
    suspect_until_s: float = 0.0
    is_ready_told: bool = True  # by the log, or nothing was told
    is_drain_told: bool = False
    reach: Reach = field(default_factory=Reach)
    cache: WorkerCache = field(init=False)  # of P
    key: Key = field(init=False)  # one object, as each prompt that it had remembers it

    def __post_init__(self) -> None:
        self.key = self.member.key
        self.cache = WorkerCache(self.key, self.member.cache_tokens)

    @property
    def linked(self) -> bool:
        """Its Run stream stands."""
        return self.stream is not None

    @property
    def is_awaited(self) -> bool:
        """Its Run stream stands, and says nothing for longer than makes dead."""
        return self.stream is not None and self.stream.is_awaited

    @property
    def serves(self) -> bool:
        """Its Run stream stands, and is not silent for that long."""
        return self.linked and not self.is_awaited

    @property
    def is_quiet(self) -> bool:
        """Nothing was heard for a while, or for longer."""
        return self.stream is not None and self.stream.quiet_s is not None

    def busy(self) -> tuple[float, int]:
        """To compare by. Our own count is exact and immediate; only what other routers have there, and how full its pool is,
        the worker tells."""
        load = self.member.load
        used = 1.0 - load.free_pages / load.total_pages if load.total_pages else 0.0
        return self.pending + self.others + used, self.pending

    def summary(self, now_s: float) -> dict[str, Any]:
        """As JSON-able data; of P also what decides where the next prompt goes."""
        member = self.member
        found = {
            "address": member.address,
            "role": member.role.value,
            "worker": member.worker,
            "fingerprint": member.card.fingerprint,
            "bits": member.bits,
            "linked": self.linked,
            "quiet": self.is_quiet,
            "draining": member.draining,
            "not_ready": member.not_ready,
            "suspect": self.suspect_until_s > now_s,
            "pending": self.pending,
            "running": member.load.running,  # of all routers, as it last told
            "waiting": member.load.waiting,
            "silent_s": round(now_s - self.last_seen_s, 3),
        }
        if member.role is not Role.PREFILL:
            return found
        speed = member.load.speed
        return found | {
            "pending_tokens": self.pending_tokens,
            "pending_cached_tokens": self.pending_cached,
            "others_tokens": self.others_tokens,
            "tokens_per_s": None if speed is None else [round(speed.least), round(speed.most)],
            "cache_tokens": self.cache.num_tokens,
            "cache_written_tokens": self.cache.written,
        }
