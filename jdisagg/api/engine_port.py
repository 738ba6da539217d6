"""An engine thread as `worker_service.WorkerEngine`."""

from __future__ import annotations

from jdisagg.core.fleet import Load
from jdisagg.core.requests import EngineRequest
from jdisagg.roles.engine_thread import EngineThread
from jdisagg.roles.inbox import Cancel, Submit
from jdisagg.roles.ports import OutputSink


class EnginePort:
    """Posts to the engine's inbox; reads what the engine publishes for any thread."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Run it; outputs and refusals go to `sink` from the engine thread."""
        self._thread.loop.inbox.post(Submit(request, sink))

    def cancel(self, request_id: str, attempt: int) -> None:
        """Forget it; unknown ids and other attempts are ignored."""
        self._thread.loop.inbox.post(Cancel(request_id, attempt))

    @property
    def load(self) -> Load:
        """As of the last tick."""
        return self._thread.loop.load

    @property
    def ticks(self) -> int:
        """Finished ticks."""
        return self._thread.ticks
