"""When things happened to one request, and the metrics made of it: queue, prefill, transfer, decode, TTFT, ITL."""

from __future__ import annotations

from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import FinishReason, Output


class Timeline:
    """Marks of one request in seconds of the engine's clock; observed into `metrics` as they complete."""

    def __init__(self, metrics: Metrics, arrived_s: float) -> None:
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._scheduled_s: float | None = None
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._kv_s: float | None = None

    def scheduled(self, now_s: float) -> None:
        """First work on the request: its first prefill chunk, or its hand-off accepted by P."""
        if self._scheduled_s is None:
            self._scheduled_s = now_s
            self._metrics.request_queue_seconds.observe(now_s - self._arrived_s)

    def kv_arrived(self, now_s: float) -> None:
        """Every piece of its KV is in the pool (decode role)."""
        self._kv_s = now_s
        if self._first_s is not None:
            self._metrics.request_transfer_seconds.observe(max(0.0, now_s - self._first_s))

    def produced(self, num_tokens: int, now_s: float) -> None:
        """`num_tokens` new tokens are on their way to the client."""
        if num_tokens == 0:
            return
        if self._first_s is None:
            self.scheduled(now_s)
            self._first_s = now_s
            self._metrics.ttft_seconds.observe(now_s - self._arrived_s)
            if self._scheduled_s is not None:
                self._metrics.request_prefill_seconds.observe(now_s - self._scheduled_s)
        elif self._last_s is not None:
            for _ in range(num_tokens):
                self._metrics.itl_seconds.observe((now_s - self._last_s) / num_tokens)
        self._last_s = now_s
        self._metrics.generated_tokens.inc(num_tokens)

    def finished(self, output: Output, now_s: float) -> None:
        """The last output is on its way."""
        if self._first_s is not None and output.finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._metrics.request_decode_seconds.observe(now_s - self._first_s)
        reason = output.finish.value if output.finish else "unknown"
        self._metrics.requests_finished.labels(reason=reason).inc()
