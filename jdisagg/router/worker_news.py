"""What becomes of workers, for whoever reads a router's log and its metrics: each thing once."""

from __future__ import annotations

import logging

import grpc
from prometheus_client import Counter

from jdisagg.api.worker.client import CLOSED, SILENT
from jdisagg.core.fleet import WHERE_TO_LOOK, Member
from jdisagg.router.entry import Entry
from jdisagg.router.lost_workers import LostWorkers

log = logging.getLogger(__name__)

MANY_MISSES = 4  # attempts, seconds in all: one that starts is reached before
LAST_WORDS_S = 0.5  # a process that ends may be heard for as long after its stream
EVICTED = "its heartbeats stopped"
REPLACED = "another process took its address"
LOSS_OF = {CLOSED: "closed", SILENT: "silent", EVICTED: "evicted", REPLACED: "replaced"}  # else "broken"


class WorkerNews:
    """Remembers in entries what was said of them, and who was lost."""

    def __init__(self, num_lost: Counter) -> None:
        """`num_lost` by `reason`."""
        self._num_lost = num_lost
        self.lost = LostWorkers()

    def registered(self, member: Member) -> None:
        """A prefill worker is there; of others it is said that they are connected."""
        self.lost.is_back(member.key)
        log.info("%s worker %s has registered", member.role.value, member.worker)

    def connected(self, entry: Entry) -> None:
        """Its Run stream stands."""
        self.lost.is_back(entry.key)
        log.info("%s worker %s is connected", *_who(entry))

    def waited_for(self, entry: Entry, lease_s: float) -> None:
        """It is silent, and not taken for dead."""
        text = "%s worker %s is silent, as is everybody else who could serve its %d requests: waiting, %g s at most"
        log.warning(text, *_who(entry), entry.pending, lease_s)

    def heard_again(self, entry: Entry, silent_s: float) -> None:
        """It was waited for."""
        log.warning("%s worker %s is heard again after %.1f s; its %d requests go on", *_who(entry), silent_s, entry.pending)

    def not_linked(self, entry: Entry, reason: str) -> None:
        """There is no stream to a worker whose heartbeats come, which has nothing to complain of itself: said when it refuses
        our API key, or after several attempts, of which this one is told, too."""
        refusal = grpc.StatusCode.UNAUTHENTICATED.name
        if reason.startswith(refusal):
            before, entry.reach.why_not = entry.reach.why_not, reason
            if not before.startswith(refusal):
                log.error("%s worker %s refuses this router: %s", *_who(entry), reason)
        elif entry.reach.misses >= MANY_MISSES and not entry.reach.why_not and _is_heard(entry):
            entry.reach.why_not = reason
            look = f"trying until it does; look at the worker's {WHERE_TO_LOOK}"
            text = "%s worker %s has registered, and this router does not reach it: %s; %s"
            log.warning(text, *_who(entry), reason, look)

    def readiness(self, entry: Entry) -> bool:
        """That it is ready by its own word, or is not, is said when it has changed; whether it is again."""
        was_ready, entry.is_ready_told = entry.is_ready_told, not entry.member.not_ready
        if was_ready and not entry.is_ready_told:
            log.warning("%s worker %s gets no requests until it is ready: %s", *_who(entry), entry.member.not_ready)
        elif entry.is_ready_told and not was_ready:
            log.info("%s worker %s is ready", *_who(entry))
        return entry.is_ready_told and not was_ready

    def drains(self, entry: Entry, nobody: str) -> None:
        """It takes no new requests; `nobody`: what is missing from now on, "" where others do its work."""
        entry.is_drain_told = True
        if nobody:
            log.warning("%s worker %s drains, and %s", *_who(entry), nobody)
        else:
            log.info("%s worker %s drains: it gets no new requests", *_who(entry))

    def gone(self, entry: Entry, reason: str, now_s: float) -> None:
        """Its stream, or a prefill worker's heartbeats, are over."""
        has_ours = entry.member.decodes and entry.pending  # those that named a prefill worker first may be anywhere by now
        if entry.member.draining and not has_ours:
            log.info("%s worker %s has left", *_who(entry))
        else:
            log.warning("%s worker %s is lost: %s", *_who(entry), reason)
            self._num_lost.labels(reason=LOSS_OF.get(reason, "broken")).inc()
            self.lost.note(entry.member, _in_words(reason), now_s)


def _is_heard(entry: Entry) -> bool:
    """Its heartbeats go on where its stream does not: the process is there."""
    return entry.last_seen_s - entry.reach.missing_since_s > LAST_WORDS_S


def _in_words(reason: str) -> str:
    if reason == CLOSED:
        return "it closed its stream"
    return reason if reason in LOSS_OF else f"its stream broke ({reason})"


def _who(entry: Entry) -> tuple[str, str]:
    return entry.member.role.value, entry.member.worker
