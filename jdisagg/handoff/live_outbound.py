"""Every hand-off of one prefill worker, and which of them a tick has to look at.

Those whose D takes KV, or has its token, are looked at in each: the memory of P and of its decode workers bounds how many there
are. Thousands may wait in its queue, of which nothing is due before their deadline.
"""

from __future__ import annotations

from collections.abc import Iterable

from jdisagg.handoff.alarms import Alarms
from jdisagg.handoff.messages import HandoffId
from jdisagg.handoff.outbound import Outbound


class LiveOutbound:
    """By stream, and by the engine's request. Owned by the PrefillSide."""

    def __init__(self) -> None:
        self._all: dict[HandoffId, Outbound] = {}
        self._by_request: dict[str, Outbound] = {}
        self._begun: dict[HandoffId, Outbound] = {}
        self._deadlines = Alarms[HandoffId]()

    def __len__(self) -> int:
        return len(self._all)

    def get(self, handoff: HandoffId) -> Outbound | None:
        """The stream's, while it is open."""
        return self._all.get(handoff)

    def of(self, engine_request_id: str) -> Outbound | None:
        """The one for which the engine computes that."""
        return self._by_request.get(engine_request_id)

    def the_one_of(self, engine_request_id: str) -> Outbound:
        """The same, which is there."""
        return self._by_request[engine_request_id]

    def all(self) -> Iterable[Outbound]:
        """In the order in which they were opened."""
        return self._all.values()

    def begun(self) -> Iterable[Outbound]:
        """Those whose D has shown pages or has a token: all that may have pieces, or keep pages for D."""
        return self._begun.values()

    def add(self, record: Outbound) -> None:
        """A D opened it."""
        handoff = record.handoff
        assert handoff not in self._all, f"hand-off {handoff} is open already"
        self._all[handoff] = self._by_request[record.engine_request_id] = record
        self._deadlines.set(handoff, record.request.deadline_s)

    def begin(self, record: Outbound) -> None:
        """Its D shows pages, or has its token; idempotent."""
        self._begun[record.handoff] = record

    def take(self, handoff: HandoffId) -> Outbound | None:
        """It is over; None = it was."""
        record = self._all.pop(handoff, None)
        if record is not None:
            del self._by_request[record.engine_request_id]
            self._begun.pop(handoff, None)
            self._deadlines.drop(handoff)
        return record

    def take_too_late(self, now_s: float) -> list[Outbound]:
        """Whose deadline has passed: they are to be ended."""
        return [self._all[handoff] for handoff in self._deadlines.take_due(now_s)]
