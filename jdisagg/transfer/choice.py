"""Several backends in one worker: which one moves the pieces of a hand-off.

P publishes over the first backend of the hand-off's list, or over another one when that fails here or D asks for it. D
fetches a piece over the backend that its announcement names.
"""

from __future__ import annotations

from collections.abc import Sequence

from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.transfer.base import Fetcher, Piece, PieceFailed, Post, Publisher


class PublisherSet:
    """P's publishers, and the backends left to every open hand-off. For the engine thread."""

    def __init__(self, publishers: Sequence[Publisher]) -> None:
        """At least one; the first is taken for a D that names none."""
        assert publishers, "a prefill worker needs a transfer backend"
        self._publishers = {publisher.name: publisher for publisher in publishers}
        self._routes: dict[HandoffId, list[str]] = {}  # the first one is used
        self._owners: dict[str, Publisher] = {}  # key -> who publishes it

    @property
    def names(self) -> tuple[str, ...]:
        """Backends here."""
        return tuple(self._publishers)

    def open(self, handoff: HandoffId, backends: tuple[str, ...]) -> bool:
        """Pieces of `handoff` go over the first of `backends` that is here; False when none is."""
        route = [name for name in backends or self.names[:1] if name in self._publishers]
        if route:
            self._routes[handoff] = route
        return bool(route)

    def prefer(self, handoff: HandoffId, backend: str) -> None:
        """From now on `backend`, if it is here and the hand-off is open."""
        route = self._routes.get(handoff)
        if route is not None and backend in self._publishers:
            self._routes[handoff] = [backend, *(name for name in route if name != backend)]

    def move_off(self, handoff: HandoffId, backend: str) -> str | None:
        """`backend` failed the hand-off: the one it goes on over now, None where it has moved before, or has no other."""
        route = self._routes.get(handoff, [])
        if len(route) < 2 or route[0] != backend:
            return None
        del route[0]
        return route[0]

    def is_on(self, handoff: HandoffId, backend: str) -> bool:
        """Whether the next piece of `handoff` would go over that backend."""
        return self._routes.get(handoff, [])[:1] == [backend]

    def publish(self, handoff: HandoffId, key: str, piece: Piece) -> None:
        """Publish over the hand-off's backend; see Publisher."""
        publisher = self._publishers[self._routes[handoff][0]]
        self._owners[key] = publisher
        publisher.publish(handoff, key, piece)

    def discard(self, key: str) -> None:
        """Free the piece; unknown keys are ignored."""
        if publisher := self._owners.pop(key, None):
            publisher.discard(key)

    def forget(self, handoff: HandoffId) -> None:
        """The hand-off is over; its pieces are discarded one by one."""
        self._routes.pop(handoff, None)

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes held for pieces that are published or being published."""
        return sum(publisher.num_buffered_bytes for publisher in self._publishers.values())

    def close(self) -> None:
        """Free everything and stop the threads."""
        for publisher in self._publishers.values():
            publisher.close()


class FetcherSet:
    """A Fetcher that hands every piece to the fetcher of its backend."""

    def __init__(self, fetchers: Sequence[Fetcher], post: Post) -> None:
        """At least one; the first is the preferred one."""
        assert fetchers, "a decode worker needs a transfer backend"
        self._fetchers = {fetcher.name: fetcher for fetcher in fetchers}
        self._post = post
        self.name = fetchers[0].name

    def fetch(self, handoff: HandoffId, peer: str, ready: ChunkReady, deadline_s: float) -> None:
        """Get the piece over the backend it was announced for."""
        fetcher = self._fetchers.get(ready.backend or self.name)
        if fetcher is None:
            detail = f"backend is {ready.backend!r}, wanted one of {', '.join(self._fetchers)}"
            self._post(PieceFailed(handoff=handoff, ready=ready, reason="connection", detail=detail))
            return
        fetcher.fetch(handoff, peer, ready, deadline_s)

    def cancel(self, handoff: HandoffId) -> None:
        """Forget every fetch of `handoff`."""
        for fetcher in self._fetchers.values():
            fetcher.cancel(handoff)

    def close(self) -> None:
        """Stop the threads."""
        for fetcher in self._fetchers.values():
            fetcher.close()
