"""Who gets the outputs of which request. Owned by the engine thread.

A request is here from admission until its last output, its cancellation, or the end of the process; `deliver` hands each
sink everything of one tick in one call.
"""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.record import RequestRecord
from jdisagg.core.requests import EngineRequest, Output
from jdisagg.core.timeline import Timeline
from jdisagg.roles.ports import OutputSink


@dataclass(slots=True)
class Stream:
    """One live request."""

    request: EngineRequest
    sink: OutputSink
    timeline: Timeline
    front_end: str = ""  # who sent it
    is_named: bool = False  # an output has said whose it is


class Streams:
    """Live requests by id."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request: EngineRequest, sink: OutputSink, timeline: Timeline, front_end: str = "") -> None:
        """Start delivering to `sink`."""
        self._streams[request.request_id] = Stream(request, sink, timeline, front_end)

    def get(self, request_id: str) -> Stream | None:
        """The live stream of that id."""
        return self._streams.get(request_id)

    def record(self, request_id: str) -> RequestRecord | None:
        """What happens to it here is noted there."""
        stream = self._streams.get(request_id)
        return None if stream is None else stream.timeline.record

    def close(self, request_id: str) -> None:
        """Forget the request; idempotent."""
        self._streams.pop(request_id, None)

    def items(self) -> list[tuple[str, Stream]]:
        """All live streams by id."""
        return list(self._streams.items())

    def deliver(self, outputs: list[Output], now_s: float) -> None:
        """Send outputs on, grouped by sink, and close streams that finished. Outputs without a stream are dropped."""
        by_sink: dict[int, tuple[OutputSink, list[Output]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            stream.timeline.delivered(output, now_s)
            by_sink.setdefault(id(stream.sink), (stream.sink, []))[1].append(output)
            if output.finish is not None:
                self.close(output.request_id)
        for sink, batch in by_sink.values():
            sink(batch)
