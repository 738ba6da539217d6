"""What P's engine hears of one hand-off: what comes before its beginning waits for that."""

from __future__ import annotations

from collections.abc import Callable

from jdisagg.handoff.events import PeerAlive, PeerMessage, PeerOpened

Event = PeerOpened | PeerMessage | PeerAlive
Post = Callable[[Event], None]


class Posts:
    """On the loop. `post` must be thread-safe and not block."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._early: list[Event] | None = []  # None: it has begun

    def begin(self, opened: PeerOpened) -> None:
        """Post this one, and what waits for it."""
        early, self._early = self._early, None
        for event in (opened, *(early or ())):
            self._post(event)

    def put(self, event: Event) -> None:
        """Post it now or then."""
        if self._early is None:
            self._post(event)
        else:
            self._early.append(event)

    def end(self, event: PeerMessage) -> None:
        """The last one; of no use when there was no beginning, which does not come any more."""
        if self._early is None:
            self._post(event)
