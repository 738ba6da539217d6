"""What a request is counted with on the prefill worker that was named first, until its first token has come."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.router.entry import Entry
from jdisagg.router.prefixes import NOTHING_KEPT, Near
from jdisagg.router.worker_cache import WorkerCache


@dataclass(frozen=True, slots=True)
class Booking:
    """Made by `book`; `end` it once."""

    entry: Entry
    num_tokens: int  # asked of it
    num_cached: int  # of these, those that it was thought to have
    written: int  # to its cache, with this prompt
    tells_cache: bool  # what it finds in its cache says what is left there: it had time to compute what it shares with others

    @property
    def cache(self) -> WorkerCache:
        """In which the prompt is then."""
        return self.entry.cache

    def take_back(self) -> None:
        """It has not computed the prompt. What was asked of it since then is thought to be that much later than it was."""
        self.cache.written -= self.num_tokens - self.num_cached

    def end(self) -> None:
        """The worker has done its part, or will not."""
        self.entry.pending -= 1
        self.entry.pending_tokens -= self.num_tokens
        self.entry.pending_cached -= self.num_cached


def book(entry: Entry, num_tokens: int, near: Near) -> Booking:
    """Count a prompt of so many tokens there, and what is not cached of it as written to its cache."""
    kept = near.prefills.get(entry.key, NOTHING_KEPT)
    num_waiting = entry.pending_tokens - entry.pending_cached
    entry.cache.written += num_tokens - kept.num_tokens
    entry.pending += 1
    entry.pending_tokens += num_tokens
    entry.pending_cached += kept.num_tokens
    return Booking(entry, num_tokens, kept.num_tokens, entry.cache.written, tells_cache=kept.num_behind >= num_waiting)
