"""Counts pieces of KV that were fetched, and how much of that nobody had to wait for."""

from __future__ import annotations

import logging

from jdisagg.core.metrics import Metrics
from jdisagg.transfer.base import PieceArrived, PieceFailed

log = logging.getLogger(__name__)


class Transfers:
    """Feeds `jdisagg_transfer_*` of a worker that fetches. Owned by its engine thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._seconds = metrics.transfer.seconds
        self._bytes = metrics.transfer.bytes
        self._failures = metrics.transfer.failures

    def arrived(self, event: PieceArrived) -> None:
        """A piece is on the device."""
        backend = event.ready.backend
        self._seconds.labels(backend=backend).observe(event.seconds)
        self._bytes.labels(backend=backend).inc(event.ready.num_bytes)

    def failed(self, event: PieceFailed) -> None:
        """A piece did not come."""
        ready, reason = event.ready, event.reason
        self._failures.labels(backend=ready.backend, reason=reason).inc()
        told = (event.handoff.request_id, ready.key, ready.backend, reason, event.detail)
        log.warning("request %s: piece %s over %s: %s %s", *told)


class HiddenTransfers:
    """The part of the transfer that passed while the prompt was still computed: a decode worker's
    `jdisagg_transfer_hidden_seconds_total`."""

    def __init__(self, metrics: Metrics) -> None:
        self._hidden_seconds = metrics.transfer.hidden_seconds
        self._computed_s: dict[str, float] = {}

    def computed(self, request_id: str, now_s: float) -> None:
        """The prompt's first token is here."""
        self._computed_s.setdefault(request_id, now_s)

    def arrived(self, request_id: str, seconds: float, now_s: float) -> None:
        """A piece that was `seconds` on its way is here."""
        began_s = now_s - seconds
        end_s = min(now_s, self._computed_s.get(request_id, now_s))
        self._hidden_seconds.inc(max(0.0, end_s - began_s))

    def forget(self, request_id: str) -> None:
        """The request ended; idempotent."""
        self._computed_s.pop(request_id, None)
