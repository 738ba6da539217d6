"""Counts how a decode worker's hand-offs went on after something failed, and says so in the log."""

from __future__ import annotations

import logging
from collections import Counter

from jdisagg.core.errors import HandoffLost, RequestError, Unavailable
from jdisagg.core.fleet import DRAINING
from jdisagg.core.logs import Seldom
from jdisagg.core.metrics import Metrics
from jdisagg.core.told import few_of
from jdisagg.handoff import actions as act
from jdisagg.roles.ports import PeerClient

log = logging.getLogger(__name__)
_STATES = {"": "usable", DRAINING: "draining"}  # by why a peer is not asked
FAILED_EVERY_S, FAILED_FIRST = 10.0, 16  # while nobody computes prompts, every request fails
REFUSED_EVERY_S = 60.0  # a worker of shorter contexts refuses every longer prompt


class Recoveries:
    """Feeds `jdisagg_recoveries_total`, `jdisagg_prefill_hedges_total` and `jdisagg_peers`. Owned by the engine thread."""

    def __init__(self, metrics: Metrics, peers: PeerClient) -> None:
        self._recoveries = metrics.fleet.recoveries
        self._hedges = metrics.fleet.hedges
        self._gauge = metrics.fleet.peers
        self._peers = peers
        self._num_alone = 0  # prompts computed here since a prefill worker last served, as none was known to answer
        self._without_kv: set[str] = set()  # peers, as long as anything is known of them
        self._told_failed = Seldom(FAILED_EVERY_S, FAILED_FIRST)
        self._told_refused = Seldom(REFUSED_EVERY_S)

    def tick(self) -> None:
        """Bring the gauge up to date, and forget who is gone."""
        failures = self._peers.failures()
        states = Counter(_STATES.get(why, "down") for why in failures.values())
        for state in ("usable", "draining", "down"):
            self._gauge.labels(state=state).set(states[state])
        self._without_kv.intersection_update(failures)

    def recovered(self, action: act.Recovered, now_s: float) -> None:
        """A rung of the ladder was taken. That no prefill worker answers is said once, not for every request, and that one
        takes less than this worker now and then."""
        self._recoveries.labels(rung=action.rung).inc()
        if not action.peer:
            if not self._num_alone:
                known = few_of(sorted({why for why in self._peers.failures().values() if why}), "; ")
                told = (action.request_id, action.cause, f" ({known})" if known else "")
                log.warning("request %s: %s%s; prompts are computed here until one does", *told)
            self._num_alone += 1
            return
        if action.unreached:
            self._peers.unreached(action.peer, action.unreached, action.cause)
        where = f", prefill peer {action.peer}" if action.peer not in action.cause else ""
        text = "request %s: recovering by %s; stage %s%s: %s"
        told = (action.request_id, action.rung, action.stage, where, action.cause)
        log.log(logging.INFO if action.refused else logging.WARNING, text, *told)
        if action.refused:
            less = "prefill peer %s does not take what this worker takes, look at its flags: %s"
            self._told_refused.say(log, logging.WARNING, less, action.peer, action.cause, now_s=now_s)

    def no_kv(self, action: act.NoKV) -> None:
        """What a peer published did not come."""
        self._without_kv.add(action.peer)
        self._peers.no_kv(action.peer, action.cause)

    def complete(self, peer: str) -> None:
        """All KV of a request is in place, the last piece of it from that peer; "" = none had to come."""
        if peer in self._without_kv:
            self._without_kv.discard(peer)
            self._peers.kv_came(peer)

    def failed(self, request_id: str, error: RequestError, now_s: float) -> None:
        """No rung is left, and the request ends. Of what was wrong with it, or came too late, its client is told alone."""
        if isinstance(error, HandoffLost | Unavailable):
            why = error.message.removeprefix(f"request {request_id}: ")
            self._told_failed.say(log, logging.WARNING, "request %s: failed: %s", request_id, why, now_s=now_s)

    def served(self) -> None:
        """A prefill worker's first token came."""
        if self._num_alone:
            log.info("a prefill worker serves again; %d prompts were computed here meanwhile", self._num_alone)
            self._num_alone = 0

    def hedged(self, action: act.Hedged) -> None:
        """A second prefill worker had been asked, as the first was quiet; now one of the two goes on."""
        self._hedges.labels(outcome=action.outcome).inc()
        goes_on = action.other if action.outcome == "moved" else action.peer
        told = (action.request_id, action.peer, action.other, action.outcome, goes_on)
        log.debug("request %s: prefill peer %s was quiet, %s was asked: %s, goes on at %s", *told)
