"""Which computed prompts stand back when P's pool is full of them: their receivers have no memory, and others wait.

A receiver is full while a prompt of its has been computed for `STUCK_S`, or is parked, and it has shown no memory for it: it
takes what is its as its own requests end, and the next prompt for it would lie here just as long. As it frees one place of P's
after the other, its prompts can fill the pool for ever though it never stands still. So they stand back, whatever moves now and
then, for those of a receiver that is not full and has less than half as many lying here. Between full ones nobody gains by
that, and each prompt that stands back is computed twice: there nothing may move for `STUCK_S`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import inf

from jdisagg.core.looks import Looks
from jdisagg.handoff.live_outbound import LiveOutbound
from jdisagg.handoff.messages import HandoffId
from jdisagg.handoff.outbound import Outbound, OutboundStage

STUCK_S = 0.25  # a receiver would have taken the memory just as well
FAIR = 2  # times as many computed prompts as another one's are no reason: it has enough for a while


class FullPool:
    """Owned by the PrefillSide. What P stood still meanwhile is no time: what D said is on its way."""

    def __init__(self) -> None:
        self._looks = Looks(STUCK_S)
        self._now_s = 0.0  # by a clock that stands still while this process does
        self._parkable_s: dict[HandoffId, float] = {}  # since which look
        self._stuck_s: float | None = None  # since when prompts wait and none runs: computed ones hold the pages

    def to_park(self, live: LiveOutbound, counts: Mapping[str, int], now_s: float) -> tuple[str, ...]:
        """To be asked before every step; `counts`: P's prompts by status. Engine requests whose prompts are computed and whose
        receivers have shown no memory, of which one stands back; none unless the whole step before started nobody though others
        waited, and computed ones hold pages."""
        self._now_s = self._looks.awake_s(now_s)
        parkable = [record for record in live.begun() if record.is_parkable]
        self._parkable_s = {record.handoff: self._parkable_s.get(record.handoff, self._now_s) for record in parkable}
        if not self._is_stuck(counts):
            return ()
        return tuple(record.engine_request_id for record in self._of_whom(parkable, live))

    def _is_stuck(self, counts: Mapping[str, int]) -> bool:
        num_waiting = counts["waiting"] + counts["prealloc"]
        if not (num_waiting and counts["publishing"]) or counts["running"] or counts["transfer"]:
            self._stuck_s = None
            return False
        if self._stuck_s is None:
            self._stuck_s = self._now_s
            return False
        return True

    def _of_whom(self, parkable: list[Outbound], live: LiveOutbound) -> list[Outbound]:
        """Those of them of which one stands back."""
        full = {record.receiver for record in parkable if self._now_s - self._parkable_s[record.handoff] >= STUCK_S}
        full.update(record.receiver for record in live.begun() if record.stage is OutboundStage.PARKED)
        of_full = [record for record in parkable if record.receiver in full]
        is_awaited = any(record.is_awaited for record in live.begun())  # by a receiver that holds memory for it
        if is_awaited or (self._stuck_s is not None and self._now_s - self._stuck_s >= STUCK_S):
            return of_full or parkable
        waiting = {record.receiver for record in live.all() if not record.is_told} - full
        num_held = Counter(record.receiver for record in parkable)
        least = min((num_held[receiver] for receiver in waiting), default=inf)
        return [record for record in of_full if num_held[record.receiver] > FAIR * least]
