"""What a client feels of one request, TTFT and inter-token latency, beside the record of what happened to it here."""

from __future__ import annotations

from math import inf

from jdisagg.core.errors import DeadlineExceeded, RequestError
from jdisagg.core.metrics import Metrics
from jdisagg.core.record import RequestRecord
from jdisagg.core.requests import EngineRequest, FinishReason, Output

# A client hangs up at its own deadline, whose clock began a transit before ours; an idle engine's clock may be a tick old.
DEADLINE_SLACK_S = 0.05


class Timeline:
    """Marks of one client's request in seconds of one clock; observed into `metrics` as they come."""

    def __init__(self, metrics: Metrics, request: EngineRequest, arrived_s: float, slow_s: float = inf) -> None:
        """`slow_s`: see RequestRecord."""
        self.record = RequestRecord(metrics, request, arrived_s, slow_s)
        self._metrics = metrics
        self._num_prompt_tokens = 0 if request.choice else len(request.prompt_token_ids)  # choices share one prompt
        self._arrived_s = arrived_s if request.arrived_s is None else request.arrived_s  # its text may have waited
        self._deadline_s = request.deadline_s
        self._last_s: float | None = None
        self._num_tokens = 0

    def delivered(self, output: Output, now_s: float) -> None:
        """`output` is on its way to the client; a gap that a replay fills is one gap, as the client feels it."""
        if output.token_ids:
            self._produced(len(output.token_ids), now_s)
        if output.finish is None:
            return
        if output.error is not None:
            self.failed(output.error, now_s)
        else:
            self._end(output.finish.value, output.finish.value, now_s)

    def failed(self, error: RequestError, now_s: float) -> None:
        """It ends with an error."""
        self._end(error.reason, f"{type(error).__name__}: {error.message}", now_s)

    def broken(self, error: Exception, now_s: float) -> None:
        """A bug of ours ended it; whoever ends its call counts that, as of a bug before an engine has it, or behind."""
        self.record.ended(repr(error), self._num_tokens, now_s)

    def aborted(self, now_s: float) -> None:
        """Its client went away or cancelled; at its deadline that is what the deadline does, over gRPC."""
        if now_s >= self._deadline_s - DEADLINE_SLACK_S:
            self._end(DeadlineExceeded.reason, "its client left at the deadline", now_s)
        else:
            self._end("abort", "abort", now_s)

    def stopped(self, now_s: float) -> None:
        """Its client has all that it wanted: a stop string came."""
        self._end(FinishReason.STOP.value, "stop string", now_s)

    def _produced(self, num_tokens: int, now_s: float) -> None:
        requests = self._metrics.requests
        self.record.produced(now_s)
        if self._last_s is None:
            requests.ttft_seconds.observe(now_s - self._arrived_s)
            requests.prompt_tokens.inc(self._num_prompt_tokens)
        else:
            # The tokens of one output come at once, as of several steps in one dispatch: shared out among 64 of them a stall of
            # 2 s would be 64 gaps of 31 ms.
            requests.itl_seconds.observe(now_s - self._last_s)
            for _ in range(num_tokens - 1):
                requests.itl_seconds.observe(0.0)
        self._last_s = now_s
        self._num_tokens += num_tokens
        requests.generated_tokens.inc(num_tokens)

    def _end(self, reason: str, text: str, now_s: float) -> None:
        self._metrics.requests.finished.labels(reason=reason).inc()
        self.record.ended(text, self._num_tokens, now_s)
