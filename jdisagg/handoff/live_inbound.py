"""Every hand-off of one decode worker, and which of them a tick has to look at.

Those with pages are looked at in each: pieces come for them, or should. Memory bounds how many there are, and nothing bounds
those without, thousands of them in a full queue: they wait for an answer, for the end of a pause or for their deadline, and are
looked at when one of these is due.
"""

from __future__ import annotations

from collections.abc import Iterable

from jdisagg.handoff.alarms import Alarms
from jdisagg.handoff.full_peers import FullPeers
from jdisagg.handoff.inbound import Inbound
from jdisagg.handoff.inbound_stream import InboundStream
from jdisagg.handoff.messages import HandoffId
from jdisagg.handoff.overdue import answer_due_s


class LiveInbound:
    """By request. Owned by the DecodeSide."""

    def __init__(self) -> None:
        self.full = FullPeers()
        self._all: dict[str, Inbound] = {}
        self._with_pages: dict[str, Inbound] = {}
        self._quiet: dict[str, Inbound] = {}  # whose P has been; some may be heard again, or over
        self._alarms = Alarms[str]()  # of those without pages

    def __len__(self) -> int:
        return len(self._all)

    def get(self, request_id: str) -> Inbound | None:
        """The request's, if it has one."""
        return self._all.get(request_id)

    def find(self, handoff: HandoffId, key: str | None = None) -> tuple[Inbound, InboundStream] | None:
        """The live stream, if the piece `key` is under way on it, and whose it is."""
        record = self._all.get(handoff.request_id)
        stream = None if record is None else record.stream_of(handoff)
        if record is None or stream is None or (key is not None and key not in stream.pieces):
            return None
        return record, stream

    def all(self) -> Iterable[Inbound]:
        """In the order in which they were begun."""
        return self._all.values()

    def add(self, record: Inbound) -> None:
        """It begins."""
        request_id = record.request.request_id
        assert request_id not in self._all, f"request {request_id} has a live hand-off already"
        self._all[request_id] = record

    def forget(self, request_id: str) -> None:
        """It is over."""
        del self._all[request_id]
        self._with_pages.pop(request_id, None)
        self._alarms.drop(request_id)
        self.full.forget(request_id)

    def reserve(self, record: Inbound) -> None:
        """There are pages for all its tokens."""
        record.reserved = True
        self._with_pages[record.request.request_id] = record
        self._alarms.drop(record.request.request_id)

    def watch(self, record: Inbound) -> None:
        """What it waits for has changed, and may be due sooner."""
        if not record.reserved:
            self._alarms.set(record.request.request_id, due_s(record))

    def due(self, now_s: float) -> list[Inbound]:
        """Whom to look at now; `watch` those of them that live on."""
        woken = [self._all[request_id] for request_id in self._alarms.take_due(now_s)]
        return [*self._with_pages.values(), *woken]

    def note_quiet(self, record: Inbound) -> None:
        """Its P is."""
        self._quiet[record.request.request_id] = record

    def quiet(self) -> Iterable[Inbound]:
        """Those whose P is quiet still, and that did not move on."""
        self._quiet = {name: one for name, one in self._quiet.items() if one.stream is not None and one.stream.silent_s}
        return self._quiet.values()


def due_s(record: Inbound) -> float:
    """Before that nothing is due of one without pages."""
    next_s = record.retry_at_s if record.stream is None else answer_due_s(record.stream)
    return min(next_s, record.request.deadline_s)
