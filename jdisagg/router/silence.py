"""Whether a worker that says nothing is waited for. Pure bookkeeping: time is passed in.

    heard                                                     gets requests
      0.6 of --dead-after-s without a word: quiet             gets some where all others are quiet, too
      --dead-after-s, and another one is heard and ready      dead: its requests go on there (of unlike weights: new ones)
      --dead-after-s, and so are all others                   waited for, up to --lease-s: so long it keeps our requests, too

Where everybody is silent at once it is this router, or its network, that paused, and a replay would have nowhere to go. When
the first one is heard again the others get as long as it was silent: TCP doubles its pauses, so connections come back one by
one.
"""

from __future__ import annotations

from collections.abc import Iterable

from jdisagg.api.pulse import QUIET_SHARE
from jdisagg.router.entry import Entry


class Silence:
    """What it means."""

    def __init__(self, dead_after_s: float, lease_s: float) -> None:
        self._dead_after_s = dead_after_s
        self._longest_s = max(dead_after_s, lease_s)
        self._all_silent_s: float | None = None  # since when nobody is heard
        self._patient_until_s = 0.0

    def tell(self, entry: Entry, is_quiet: bool, now_s: float) -> None:
        """What the pulse of its Run stream says."""
        if (stream := entry.stream) is None:
            return
        if is_quiet:
            stream.quiet_s = now_s - QUIET_SHARE * self._dead_after_s
        elif stream.quiet_s is not None:
            stream.steady_s = max(stream.steady_s, now_s + (now_s - stream.quiet_s))
            stream.quiet_s, stream.is_awaited = None, False

    def waits(self, entry: Entry, heirs: Iterable[Entry], silent_s: float, now_s: float) -> bool:
        """Whether one whose Run stream is silent for long enough to be dead is not taken for that. `heirs`: who gets requests,
        where it is heard."""
        stream = entry.stream
        if stream is None or silent_s >= self._longest_s or any(_goes_on(other, now_s) for other in heirs):
            return False
        if now_s - entry.last_seen_s < QUIET_SHARE * self._dead_after_s and not stream.is_awaited:
            return False  # it sends heartbeats: the stream alone is broken
        stream.is_awaited = True
        return True

    def gone(self, everybody: Iterable[Entry], now_s: float) -> list[Entry]:
        """Those without a stream whose heartbeats stopped; later while nobody is heard, and for as long after that. To be
        called now and then."""
        entries = list(everybody)
        if entries and not any(self._is_heard(entry, now_s) for entry in entries):
            self._all_silent_s = now_s - self._dead_after_s if self._all_silent_s is None else self._all_silent_s
        elif self._all_silent_s is not None:
            self._patient_until_s = max(self._patient_until_s, now_s + self._patience_s(now_s))
            self._all_silent_s = None
        is_patient = self._all_silent_s is not None or now_s < self._patient_until_s
        patient_s = self._longest_s if is_patient else self._dead_after_s

        def is_gone(entry: Entry) -> bool:  # of a worker that decodes the stream had its time, or broke
            return now_s - entry.last_seen_s > (self._dead_after_s if entry.member.decodes else patient_s)

        return [entry for entry in entries if not entry.linked and is_gone(entry)]

    def steady_s(self, now_s: float, *, again: bool) -> float:
        """When a worker whose stream stands from now on can go on with the requests of silent ones. `again`: it had one before,
        so others may be about to come back as well."""
        patient_s = max(self._patient_until_s, now_s + self._patience_s(now_s)) if again else 0.0
        return max(now_s + self._dead_after_s, patient_s)

    def _patience_s(self, now_s: float) -> float:
        return 0.0 if self._all_silent_s is None else min(now_s - self._all_silent_s, self._longest_s)

    def _is_heard(self, entry: Entry, now_s: float) -> bool:
        if entry.linked:
            return not entry.is_quiet
        return now_s - entry.last_seen_s <= self._dead_after_s


def _goes_on(heir: Entry, now_s: float) -> bool:
    """Whether it can go on with the requests of who is silent: its stream stands, and has stood for a while."""
    return heir.stream is not None and not heir.is_quiet and heir.stream.steady_s <= now_s
