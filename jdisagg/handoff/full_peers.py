"""Who waits for a place in the queue of which P, and for how long a P that is full is left alone.

P says when a place comes free for whom it refuses, one after the other. An offer costs both event loops up to a millisecond,
and P has work enough meanwhile: what comes back sooner is refused again. Thousands that came back every two seconds took all
of the loop of P, or of D. P may err, though, so a place is not waited for longer than LONGEST_S and a half; and as soon as it
begins with a prompt of ours there is one: then whoever was refused first is offered to it, however long it was to wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from hashlib import blake2b
from operator import itemgetter

from jdisagg.handoff.inbound import Inbound
from jdisagg.handoff.messages import HandoffId

LONGEST_S = 8.0  # of what a P says
SPREAD = 0.5  # of that, so that those that were refused together do not come back together
LEAST_S = 2.0  # of half of what is left of a request: thousands with one deadline would come more and more often before it
LAST_SHARE = 0.75  # of what is left of a request, by which it asks once more, unless it was told a later time
_TURN = itemgetter(0)


def wait_s(handoff: HandoffId, told_s: float, left_s: float) -> float:
    """Seconds for which the P that refused `handoff`, and said when to come again, is not asked; `left_s`: until its deadline,
    which allows for more tries."""
    lot = blake2b(f"{handoff.request_id} {handoff.serial}".encode(), digest_size=4).digest()
    spread_s = min(told_s, LONGEST_S, max(left_s / 2, LEAST_S)) * (1 + SPREAD * int.from_bytes(lot) / 2**32)
    return min(spread_s, max(told_s, left_s * LAST_SHARE))  # a place that is promised before the deadline is asked for before


class FullPeers:
    """Hand-offs without a stream, by each P that was full for them."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[int, Inbound]]] = {}  # by peer, in turn
        self._at: dict[str, tuple[str, ...]] = {}  # the peers of each, by request
        self._turns: dict[str, int] = {}  # by request, until it is over: in the order in which they were first refused
        self._num_turns = 0

    def add(self, record: Inbound) -> None:
        """A pause begins."""
        request_id, peers = record.request.request_id, record.ladder.full_peers
        assert request_id not in self._at, f"request {request_id} waits already"
        if not peers:
            return
        if request_id not in self._turns:
            self._turns[request_id] = self._num_turns
            self._num_turns += 1
        self._at[request_id] = peers
        for peer in peers:
            insort(self._waiting.setdefault(peer, []), (self._turns[request_id], record), key=_TURN)

    def drop(self, request_id: str) -> None:
        """Its pause is over; idempotent."""
        for peer in self._at.pop(request_id, ()):
            waiting = self._waiting[peer]
            del waiting[bisect_left(waiting, self._turns[request_id], key=_TURN)]
            if not waiting:
                del self._waiting[peer]

    def forget(self, request_id: str) -> None:
        """Its hand-off is over; idempotent."""
        self.drop(request_id)
        self._turns.pop(request_id, None)

    def take_first(self, peer: str) -> Inbound | None:
        """Who waits for `peer`, and was refused before all others that do; its pause is over."""
        if peer not in self._waiting:
            return None
        _, record = self._waiting[peer][0]
        self.drop(record.request.request_id)
        return record
