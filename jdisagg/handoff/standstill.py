"""Which decode workers take nothing of what is published for them, while others wait for its room.

Pieces are published within credit, so their receiver has pages for them and fetches them at once, one after the other; one
that waits for memory has none. It may have a slow network, but each of its pieces takes no longer than that allows, and then it
says something: Ack, Want, or the end of a stream. Heartbeats alone show that its event loop runs, and nothing of its engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jdisagg.core.config import TransferConfig
from jdisagg.core.looks import Looks
from jdisagg.handoff.outbound import Outbound

SLOWEST_BYTES_PER_S = 2**20  # of a network that is worth waiting for
TRIES = 3  # a receiver fetches a piece twice before it says anything


class Standstill:
    """What the receivers of one prefill worker did last. Owned by its engine thread."""

    def __init__(self, config: TransferConfig) -> None:
        self._lease_s = config.lease_s
        self._looks = Looks()
        self._moved_s: dict[str, float] = {}  # by receiver: when it said something, or got its first piece

    def look(self, live: Iterable[Outbound], now_s: float) -> None:
        """P looks, before it judges anybody: silence in which it stood still itself is no receiver's."""
        if still_s := self._looks.stood_still_s(now_s):
            for record in live:
                record.heard_s = min(now_s, record.heard_s + still_s)
            self._moved_s = {receiver: min(now_s, moved_s + still_s) for receiver, moved_s in self._moved_s.items()}

    def moved(self, receiver: str, now_s: float) -> None:
        """It said something that is no heartbeat."""
        self._moved_s[receiver] = now_s

    def find(self, live: Iterable[Outbound], others_wait: Callable[[str], bool], now_s: float) -> list[tuple[Outbound, float]]:
        """Hand-offs with pieces that are not fetched, and for how long not. `others_wait(receiver)`: somebody beside it needs
        room, so that there is a reason to end them."""
        holding: dict[str, list[Outbound]] = {}
        for record in live:
            if any(piece.published for piece in record.pieces.values()):
                holding.setdefault(record.receiver, []).append(record)
        self._moved_s = {receiver: self._moved_s.get(receiver, now_s) for receiver in holding}
        found: list[tuple[Outbound, float]] = []
        for receiver, records in holding.items():
            still_s = now_s - self._moved_s[receiver]
            if still_s >= self._patience_s(records) and others_wait(receiver):
                found += [(record, still_s) for record in records]
        return found

    def _patience_s(self, records: Iterable[Outbound]) -> float:
        largest_bytes = max(piece.num_bytes for record in records for piece in record.pieces.values())
        return TRIES * (self._lease_s + largest_bytes / SLOWEST_BYTES_PER_S)
