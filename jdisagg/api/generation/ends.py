"""How calls end that no engine counts, on /metrics, and in the log where a bug of ours ended them."""

from __future__ import annotations

import logging
from time import monotonic
from weakref import WeakSet

from jdisagg.core.errors import Cancelled, JdisaggError, RequestError
from jdisagg.core.logs import BUG_EVERY_S, BUG_FIRST, Seldom
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import FinishReason

log = logging.getLogger(__name__)


class Ends:
    """Of one Edge. On its event loop."""

    def __init__(self, metrics: Metrics | None) -> None:
        """`metrics` None: nothing is counted."""
        self._metrics = metrics
        self._told: WeakSet[RequestError] = WeakSet()  # errors of requests that the engine had, which counts them
        self._seldom = Seldom(BUG_EVERY_S, BUG_FIRST)

    def has_counted(self, error: RequestError) -> None:
        """The engine has, or will have."""
        self._told.add(error)

    def aborted(self, num_choices: int) -> None:
        """So many choices ended before an engine had them."""
        if self._metrics is not None:
            self._metrics.requests.finished.labels(reason=FinishReason.ABORT.value).inc(num_choices)

    def failed(self, error: Exception) -> None:
        """A call ended with `error`: it is counted here unless its engine has done so, or its client is gone. What no
        JdisaggError is, is a bug, which no engine counts."""
        if self._metrics is None or isinstance(error, Cancelled) or (isinstance(error, RequestError) and error in self._told):
            return
        reason = error.reason if isinstance(error, JdisaggError) else JdisaggError.reason
        self._metrics.requests.finished.labels(reason=reason).inc()

    def tell(self, text: str, request_id: str, error: Exception) -> None:
        """Log a bug with its stack; a bug may end every call, and of many the first few are told."""
        self._seldom.say(log, logging.ERROR, text, request_id, now_s=monotonic(), error=error)

    def answered_tools(self, outcome: str) -> None:
        """An answer to a chat that offered tools is one of `CALL_OUTCOMES`."""
        if self._metrics is not None:
            self._metrics.requests.tool_answers.labels(outcome=outcome).inc()
