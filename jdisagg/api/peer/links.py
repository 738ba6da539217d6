"""D's connections to all P: one of each for new streams, and those given up before, which close with their last stream.

KV is read over connections of its own, which end by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from jdisagg.api.peer.link import PeerLink


class PeerLinks:
    """By address. Used on one event loop."""

    def __init__(self, make: Callable[[str], PeerLink], *, start: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """`make` a connection to a peer; `start` runs a task."""
        self._make = make
        self._start = start
        self._current: dict[str, PeerLink] = {}
        self._retiring: set[PeerLink] = set()  # given up, and not yet closed

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

    def give_up(self, link: PeerLink) -> None:
        """New streams take another one; those on it live or die by their own heartbeats. May be called again."""
        if self.is_current(link):
            del self._current[link.peer]
            self._retiring.add(link)
            self._start(self._retire(link))

    async def close(self) -> None:
        """Close all, with whatever runs on them."""
        links = [*self._current.values(), *self._retiring]
        self._current, self._retiring = {}, set()
        await asyncio.gather(*(link.close() for link in links))

    async def _retire(self, link: PeerLink) -> None:
        await link.retire()
        self._retiring.discard(link)
