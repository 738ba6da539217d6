"""Whose a place is that comes free in P's queue while it is full.

A D hears when P begins with a prompt of its, and offers the next one at once. One that has none here comes back when it was
told to, finds that place taken, and would do so for ever. So for a receiver that was refused a place is kept from those that
have more prompts here than it, until it comes for it or is late: whoever waits for P gets as many places as others, or as it
wants.
"""

from __future__ import annotations

from collections import Counter

from jdisagg.handoff.full_peers import LONGEST_S, SPREAD

BACK_S = LONGEST_S * (1 + SPREAD) + 1.0  # who still wants a place is back by then, its loop a little late


class QueueShares:
    """Owned by the engine thread of a prefill worker."""

    def __init__(self) -> None:
        self._receivers: dict[str, str] = {}  # of live hand-offs, by engine request id
        self._num_here = Counter[str]()  # by receiver
        self._refused_s: dict[str, float] = {}  # of receivers that took no place since, when they were last refused

    def num_kept(self, receiver: str, now_s: float) -> int:
        """Free places that are not for `receiver`."""
        self._refused_s = {one: then_s for one, then_s in self._refused_s.items() if now_s - then_s < BACK_S}
        return sum(self._num_here[one] < self._num_here[receiver] for one in self._refused_s)

    def refused(self, receiver: str, now_s: float) -> None:
        """There was no place for it."""
        self._refused_s[receiver] = now_s

    def opened(self, request_id: str, receiver: str) -> None:
        """A prompt of its waits."""
        self._refused_s.pop(receiver, None)
        self._receivers[request_id] = receiver
        self._num_here[receiver] += 1

    def closed(self, request_id: str) -> None:
        """Its hand-off is over; idempotent."""
        if (receiver := self._receivers.pop(request_id, None)) is not None:
            self._num_here[receiver] -= 1
            if not self._num_here[receiver]:
                del self._num_here[receiver]
