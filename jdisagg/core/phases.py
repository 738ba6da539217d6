"""The phases of one request's time in one process. Every second belongs to exactly one, so they add up to the whole.

queue -> prefill -> [transfer] -> decode       a preempted request goes back to the queue and through prefill again
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where a request's time goes. Values are the metric's names."""

    QUEUE = "queue"  # nobody works on it
    PREFILL = "prefill"  # its prompt is computed, here or on a peer
    TRANSFER = "transfer"  # its first token is known, its KV is on the way
    DECODE = "decode"


class Phases:
    """Seconds per phase. Times may stand still but never go back: an earlier one counts as the latest."""

    def __init__(self, now_s: float) -> None:
        """The request has just come and waits."""
        self.phase = Phase.QUEUE
        self.has_token = False
        self._awaits_kv = False  # its token came from a peer, its KV has not
        self.seconds: dict[Phase, float] = {}  # of phases left so far
        self._since_s = now_s

    def started(self, now_s: float) -> bool:
        """Somebody works on its prompt. True when it waited until now."""
        waited = self.phase is Phase.QUEUE
        if waited:
            self._leave(now_s, Phase.PREFILL)
        return waited

    def produced(self, now_s: float) -> None:
        """A token is known: whatever went before, it decodes."""
        self.started(now_s)
        self.has_token = True
        if self.phase is Phase.PREFILL:
            self._leave(now_s, Phase.DECODE)

    def waits(self, now_s: float) -> None:
        """Who worked on its prompt is lost, and nobody does until it is `started` again. Nothing once its token is known."""
        if self.phase is Phase.PREFILL:
            self._leave(now_s, Phase.QUEUE)

    def awaits_kv(self) -> None:
        """Its first token is a peer's, and its KV is to come: until then nothing is decoded."""
        self._awaits_kv = True

    def kv_given_up(self, now_s: float) -> None:
        """Its KV will not come, and it waits to be computed here: the time since the first token was transfer."""
        if self.phase is not Phase.QUEUE:
            self._leave(now_s, Phase.QUEUE)
        self._awaits_kv = False

    def kv_arrived(self, now_s: float) -> None:
        """Its KV is complete here: the time since the first token was transfer."""
        self._awaits_kv = False
        if self.phase is Phase.DECODE:
            self.phase = Phase.TRANSFER
        if self.has_token:
            self._leave(now_s, Phase.DECODE)
        self.seconds.setdefault(Phase.TRANSFER, 0.0)

    def handed_over(self) -> None:
        """Its KV was fetched by its receiver, or is not wanted any more: nothing was decoded here."""
        if self.phase is Phase.DECODE:
            self.phase = Phase.TRANSFER

    def preempted(self, now_s: float) -> None:
        """Its KV is gone; it waits again."""
        self._leave(now_s, Phase.QUEUE)

    def parked(self, now_s: float) -> None:
        """Its token is known, and its KV went away before its receiver had memory for it."""
        self.handed_over()
        self._leave(now_s, Phase.QUEUE)

    def ended(self, now_s: float) -> None:
        """Close the phase it is in."""
        self._leave(now_s, self.phase)

    @property
    def total_s(self) -> float:
        """Everything counted so far."""
        return sum(self.seconds.values())

    def _leave(self, now_s: float, phase: Phase) -> None:
        now_s = max(now_s, self._since_s)
        left = Phase.TRANSFER if self._awaits_kv and self.phase is Phase.DECODE else self.phase
        self.seconds[left] = self.seconds.get(left, 0.0) + now_s - self._since_s
        self.phase, self._since_s = phase, now_s
