"""Who waits for a place in the queue of which P, and for how long a P that is full is left alone.

P says when a place comes free for whom it refuses, one after the other. An offer costs both event loops up to a millisecond,
and P has work enough meanwhile: what comes back sooner is refused again. Thousands that came back every two seconds took all
of the loop of P, or of D. P may err, though, so a place is not waited for longer than LONGEST_S and a half; and as soon as it
begins with a prompt of ours there is one: then whoever was begun first is offered to it, however long it was to wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from hashlib import blake2b
from operator import attrgetter

from jdisagg.handoff.inbound import Inbound
from jdisagg.handoff.messages import HandoffId

LONGEST_S = 8.0  # of what a P says
SPREAD = 0.5  # of that, so that those that were refused together do not come back together
_ORDER = attrgetter("number")


def wait_s(handoff: HandoffId, told_s: float, left_s: float) -> float:
    """Seconds for which the P that refused `handoff`, and said when to come again, is not asked; `left_s`: until its deadline,
    which allows for more tries."""
    lot = blake2b(f"{handoff.request_id} {handoff.serial}".encode(), digest_size=4).digest()
    return min(min(told_s, LONGEST_S) * (1 + SPREAD * int.from_bytes(lot) / 2**32), left_s / 2)


class FullPeers:
    """Hand-offs without a stream, by each P that was full for them."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Inbound]] = {}  # by peer, in the order in which they were begun

    def add(self, record: Inbound) -> None:
        """A pause begins."""
        assert not record.waits_at, f"request {record.request.request_id} waits already"
        record.waits_at = record.ladder.full_peers
        for peer in record.waits_at:
            insort(self._waiting.setdefault(peer, []), record, key=_ORDER)

    def drop(self, record: Inbound) -> None:
        """It is over, or the hand-off; idempotent."""
        for peer in record.waits_at:
            waiting = self._waiting[peer]
            del waiting[bisect_left(waiting, record.number, key=_ORDER)]
            if not waiting:
                del self._waiting[peer]
        record.waits_at = ()

    def first(self, peer: str) -> Inbound | None:
        """Who waits for `peer`, and was begun before all others that do."""
        return self._waiting[peer][0] if peer in self._waiting else None
