"""D's connections to all P: one of each for new streams, and those given up before, which close with their last stream.

KV is read over connections of its own, by all hand-offs at a peer. They are ended when it is gone, and not when it has failed
one Hello or one stream while other streams hear it: these have heartbeats, and find out as soon as a Hello would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from jdisagg.api.peer.link import PeerLink


class PeerLinks:
    """By address. Used on one event loop."""

    def __init__(
        self,
        make: Callable[[str], PeerLink],
        *,
        on_down: Callable[[str], None],
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`make` a connection to a peer; `on_down` hears of one that is gone, or left with its last stream; `start` runs a
        task."""
        self._make = make
        self._on_down = on_down
        self._start = start
        self._current: dict[str, PeerLink] = {}
        self._retiring: set[PeerLink] = set()  # given up, and not yet closed
        self._untold: set[PeerLink] = set()  # those of them of which `on_down` has not heard

    def of(self, peer: str) -> PeerLink:
        """The one for new streams."""
        if (link := self._current.get(peer)) is None:
            link = self._current[peer] = self._make(peer)
        return link

    def find(self, peer: str) -> PeerLink | None:
        """The same, if there is one."""
        return self._current.get(peer)

    def is_current(self, link: PeerLink) -> bool:
        """Whether new streams take it."""
        return self._current.get(link.peer) is link

    def give_up(self, link: PeerLink, *, is_gone: bool) -> None:
        """New streams take another one; those on it live or die by their own heartbeats. `is_gone`: a stream broke on it, or
        heard nothing more. May be called again."""
        if self.is_current(link):
            del self._current[link.peer]
            self._retiring.add(link)
            self._untold.add(link)
            self._start(self._retire(link))
        self._tell(link, is_gone=is_gone)

    async def close(self) -> None:
        """Close all, with whatever runs on them."""
        links = [*self._current.values(), *self._retiring]
        self._current, self._retiring, self._untold = {}, set(), set()
        await asyncio.gather(*(link.close() for link in links))

    async def _retire(self, link: PeerLink) -> None:
        await link.retire()
        self._tell(link, is_gone=False)
        self._retiring.discard(link)
        self._untold.discard(link)

    def _tell(self, link: PeerLink, *, is_gone: bool) -> None:
        """Of a link that was given up, once: now, unless something hears the peer all the same."""
        if link not in self._untold:
            return
        others = [one for one in (*self._current.values(), *self._retiring) if one.peer == link.peer and one is not link]
        if any(other.has_streams for other in others) or (link.has_streams and not is_gone):
            return
        self._untold.difference_update((link, *others))
        self._on_down(link.peer)
