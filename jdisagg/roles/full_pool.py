"""Which computed prompts stand back when P's pool is full of them: their receivers have no memory, and others wait.

    opened -> told (its first token was sampled) -> parked -> unparked, closed at any time

A receiver is full while a prompt of its has been computed for `STUCK_S`, or is parked, and it has shown no memory for it: it
takes what is its as its own requests end, and the next prompt for it would lie here just as long. As it frees one place of P's
after the other, its prompts can fill the pool for ever though it never stands still. So they stand back, whatever moves now and
then, for those of a receiver that is not full and has less than half as many lying here. Between full ones nobody gains by
that, and each prompt that stands back is computed twice: there nothing may move for `STUCK_S`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf

from jdisagg.core.looks import Looks

STUCK_S = 0.25  # a receiver would have taken the memory just as well
FAIR = 2  # times as many computed prompts as another one's are no reason: it has enough for a while


class FullPool:
    """Owned by the engine thread of a prefill worker. What P stood still meanwhile is no time: what D said is on its way."""

    def __init__(self) -> None:
        self._looks = Looks(STUCK_S)
        self._now_s = 0.0  # by a clock that stands still while this process does
        self._receivers: dict[str, str] = {}  # of live hand-offs, by engine request id
        self._told_s: dict[str, float] = {}  # those of them that are computed, since when
        self._just_told: list[str] = []  # since the latest look
        self._parked = set[str]()
        self._stuck_s: float | None = None  # since when prompts wait and none runs: computed ones hold the pages

    def opened(self, request_id: str, receiver: str) -> None:
        """It waits."""
        self._receivers[request_id] = receiver

    def told(self, request_id: str) -> None:
        """Its prompt is computed, its first token sampled, in the step that ended just now."""
        self._just_told.append(request_id)

    def parked(self, request_id: str) -> None:
        """It gave its pages to others."""
        self._parked.add(request_id)

    def unparked(self, request_id: str) -> None:
        """Its receiver has memory for it."""
        self._parked.discard(request_id)

    def closed(self, request_id: str) -> None:
        """Its hand-off is over."""
        self._receivers.pop(request_id, None)
        self._told_s.pop(request_id, None)
        self._parked.discard(request_id)

    def look(self, counts: dict[str, int], now_s: float) -> bool:
        """To be asked before every step; `counts`: P's prompts by status. Whether the whole step before it started nobody
        though prompts waited, and computed ones hold pages."""
        self._now_s = self._looks.awake_s(now_s)
        self._told_s |= {request_id: self._now_s for request_id in self._just_told if request_id in self._receivers}
        self._just_told.clear()
        num_waiting = counts["waiting"] + counts["prealloc"]
        if not (num_waiting and counts["publishing"]) or counts["running"] or counts["transfer"]:
            self._stuck_s = None
            return False
        if self._stuck_s is None:
            self._stuck_s = self._now_s
            return False
        return True

    def to_park(self, parkable: Sequence[str], *, is_awaited: bool) -> tuple[str, ...]:
        """Of these, computed prompts whose receivers have shown no memory, those of which one stands back, behind a look that
        found the pool full. `is_awaited`: some receiver holds memory for a prompt that is not computed."""
        full = {self._receivers[request_id] for request_id in parkable if self._is_late(request_id)}
        full.update(self._receivers[request_id] for request_id in self._parked)
        of_full = tuple(request_id for request_id in parkable if self._receivers[request_id] in full)
        if is_awaited or (self._stuck_s is not None and self._now_s - self._stuck_s >= STUCK_S):
            return of_full or tuple(parkable)
        waiting = {receiver for request_id, receiver in self._receivers.items() if request_id not in self._told_s} - full
        num_held = Counter(self._receivers[request_id] for request_id in parkable)
        least = min((num_held[receiver] for receiver in waiting), default=inf)
        return tuple(request_id for request_id in of_full if num_held[self._receivers[request_id]] > FAIR * least)

    def _is_late(self, request_id: str) -> bool:
        return self._now_s - self._told_s.get(request_id, self._now_s) >= STUCK_S
