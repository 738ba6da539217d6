"""How much of the transfer passed while the prompt was still computed: the part that nobody had to wait for."""

from __future__ import annotations

from jdisagg.core.metrics import Metrics


class TransferOverlap:
    """Feeds `jdisagg_transfer_hidden_seconds_total` of a decode worker. Owned by its engine thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._hidden_seconds = metrics.transfer_hidden_seconds
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
