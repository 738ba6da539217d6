"""Which prefill worker is asked next, and when to stop asking. One Ladder per request.

A worker that failed is not asked again, unless it is the only one: then once more, after a pause. One that was merely full is
asked again, not before the time that it named, for as long as the request's deadline allows. Whether somebody has come
meanwhile is looked at after pauses that double from 0.1 s to 2 s; of a fleet that is full one more is asked then, not as many
as a router names once again. A worker for which the request is wrong is never asked again, and its word is not the last: the
decode worker has checked the request and found it right, so the other one serves less (a shorter context, fewer pages, another
model). Nor is one asked again that has a setting of its own to blame, which it names. Those that have come since the request
was begun are asked when a pause is over, before those that were full, and where nobody else is left.
"""

from __future__ import annotations

from collections.abc import Callable

from jdisagg.core.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, NumericalError, RequestError, Unavailable
from jdisagg.core.fleet import MAX_PREFILL_PEERS

PeersNow = Callable[[], tuple[str, ...]]  # whom one request may ask, as it is known now, in order of preference

FULL = "full"  # why a peer has no room: its queue has none
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
_FINAL = (DeadlineExceeded, NumericalError)
_UNFIT = (InvalidRequest, ModelNotFound)


def is_final(error: RequestError | None) -> bool:
    """Whether `error` would come back from every other worker too, so that the request ends with it: a grammar leads all of
    them to the same place."""
    return isinstance(error, _FINAL) or (isinstance(error, InvalidRequest) and error.field == "grammar")


def is_invalid(error: RequestError | None) -> bool:
    """Whether a worker finds the request wrong, and not itself."""
    return isinstance(error, _UNFIT)


def is_unfit(error: RequestError | None) -> bool:
    """Whether `error` says that its worker, and no other, can never serve the request."""
    return is_invalid(error) or (isinstance(error, Unavailable) and error.field is not None)


class Ladder:
    """Peers of one request in order of preference, and what became of them."""

    def __init__(self, peers: tuple[str, ...], peers_now: PeersNow = tuple) -> None:
        """`peers_now`: asked for more when those are not enough."""
        self.peers = self._first = tuple(dict.fromkeys(peers))
        self._peers_now = peers_now
        self._num_failures: dict[str, int] = {}
        self._unfit: dict[str, RequestError] = {}
        self._went_down: dict[str, bool] = {}  # whether no more is known of it than that it is silent
        self._busy: dict[str, tuple[str, float]] = {}  # why, and until when at least
        self.pause_s = FIRST_PAUSE_S  # the next one

    def failed(self, peer: str, error: RequestError | None = None) -> None:
        """`peer` lost the hand-off; `error`: what it said, if it did."""
        self._num_failures[peer] = self._num_failures.get(peer, 0) + 1
        if error is not None and is_unfit(error):
            self._unfit[peer] = error

    def went_down(self, peer: str, *, silently: bool) -> None:
        """`peer` did, and it had taken the request; `silently`: or it, or the way to it, stands still."""
        self._went_down[peer] = silently

    def lives(self, peer: str) -> None:
        """`peer` had not gone down after all."""
        self._went_down.pop(peer, None)

    def busy(self, peer: str, why: str, until_s: float = 0.0) -> None:
        """`peer` has no room now; `why`: FULL, say. It is not asked again before `until_s`."""
        self._busy[peer] = why, until_s

    def has_room(self, peer: str) -> None:
        """It may have some by now."""
        self._busy.pop(peer, None)

    def look_for_room(self, now_s: float) -> None:
        """A full one whose time is over may have some by now."""
        self._busy = {peer: busy for peer, busy in self._busy.items() if busy[0] != FULL or busy[1] > now_s}

    def ask_all_again(self) -> None:
        """Who had no room may have some by now."""
        self._busy.clear()

    def next_peer(self, but: str = "") -> str | None:
        """The first peer that has neither failed nor said it is full; not `but`."""
        for peer in self.peers:
            if peer != but and peer not in self._num_failures and peer not in self._busy:
                return peer
        return None

    def next_or_new_peer(self) -> str | None:
        """The same, or one that has come since."""
        peer = self.next_peer()
        are_left = self._busy.keys().isdisjoint(self.peers)  # those that were full, for others that had come
        if peer is None and (are_left or len(self._busy) < MAX_PREFILL_PEERS):  # else enough of them were full for now
            self._join()
            peer = self.next_peer()
        return peer

    def next_beside_full(self) -> str | None:
        """The same, unless enough of them are full for now."""
        return None if len(self._busy) >= max(MAX_PREFILL_PEERS, len(self._first)) else self.next_or_new_peer()

    def resume(self, now_s: float) -> str | None:
        """Whom to ask when a pause is over: one that has come since, else whoever was full and has had its time, or
        `after_pause`; None = another pause."""
        self._join()
        new, only = self.next_peer(), self.after_pause()
        self._busy = {peer: busy for peer, busy in self._busy.items() if busy[1] > now_s}
        return new or self.next_peer() or (None if only in self._busy else only)

    def _join(self) -> None:
        """Those known now, in the order of now, no more at a time than a router names, those that were full last. None for a
        request that may be what its peers died of, or that none of many could serve."""
        if self._is_suspect or len(self._unfit) >= 2 * MAX_PREFILL_PEERS:
            return
        everyone = dict.fromkeys((*self._peers_now(), *self.peers))
        hopes = sorted((peer for peer in everyone if peer not in self._num_failures), key=self._busy.__contains__)
        kept = {*self._num_failures, *hopes[: max(MAX_PREFILL_PEERS, len(self._first))]}
        self.peers = tuple(peer for peer in everyone if peer in kept)

    def after_pause(self) -> str | None:
        """The peer to ask again after `pause`: a full one, or the only one there was at first, that failed once; None = no hope
        left."""
        waiting = [peer for peer in self.peers if peer in self._busy]
        if waiting:
            return waiting[0]
        at_first = self._first or self.peers
        if len(at_first) != 1 or self._num_failures.get(at_first[0]) != 1 or at_first[0] in self._unfit or self._is_suspect:
            return None
        return at_first[0]

    @property
    def _is_suspect(self) -> bool:
        return len(self._num_failures) - len(self._unfit) >= MAX_PREFILL_PEERS

    @property
    def num_deaths(self) -> int:
        """How many have gone down with the request, one after the other, if it may be what they died of: as many as a router
        names, or all there are, none of them silently; else 0. Those that were not reached, or whose KV did not come, say
        nothing about it."""
        num_down = len(self._went_down)
        are_all = self._went_down.keys() >= set(self.peers) and not any(self._went_down.values())
        return num_down if are_all or num_down >= MAX_PREFILL_PEERS else 0

    @property
    def verdict(self) -> RequestError | None:
        """What a peer said of the request if none of them can serve it, one that blames itself before one that finds it wrong;
        None while one was only lost, or not asked."""
        if not self.peers or len(self._unfit) < len(self.peers):
            return None
        return next((error for error in self._unfit.values() if isinstance(error, Unavailable)), self._unfit[self.peers[-1]])

    @property
    def had_no_room(self) -> str:
        """Who is not asked now for want of room, and why; "" = nobody."""
        return ", ".join(f"{peer} was {why}" for peer, (why, _) in self._busy.items())

    @property
    def full_peers(self) -> tuple[str, ...]:
        """Those in whose queue there was no place."""
        return tuple(peer for peer in self.peers if peer in self._busy and self._busy[peer][0] == FULL)

    def pause(self, now_s: float) -> float:
        """Seconds to wait before `resume`: as many as double with every call, or fewer, as the first one that was busy has had
        its time."""
        until_s = min((self._busy[peer][1] for peer in self.peers if peer in self._busy), default=now_s)
        if 0.0 < until_s - now_s < self.pause_s:
            return until_s - now_s
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, LONGEST_PAUSE_S)
        return pause_s
