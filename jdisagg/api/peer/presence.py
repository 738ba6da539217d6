"""Which prefill workers a decode worker asks whether they are there, before any request needs one.

Those of --prefill are asked for ever. Those that routers tell of are asked when they are new, and again whenever they failed,
until they answer: a router hears their heartbeats, which does not mean that this worker reaches them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

PROBE_INTERVAL_S = 1.0


class Presence:
    """`is_asked` on any thread, everything else on the loop."""

    def __init__(
        self,
        *,
        ask: Callable[[str], Awaitable[None]],
        is_good: Callable[[str], bool],
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`ask` says Hello to a peer, and raises nothing; `is_good`: the peer could be used the last time that it was spoken
        to; `start` runs a task."""
        self._ask = ask
        self._is_good = is_good
        self._start = start
        self._watched: set[str] = set()
        self._offered: frozenset[str] = frozenset()
        self._asking: set[str] = set()  # or asked a moment ago

    def watch(self, peer: str) -> None:
        """Ask it for ever."""
        self._watched.add(peer)
        self._start(self._ask_forever(peer))

    def offer(self, peers: frozenset[str]) -> None:
        """These are all that routers tell of. To be called again and again."""
        self._offered = peers
        for peer in peers - self._watched - self._asking:
            if not self._is_good(peer):
                self._asking.add(peer)
                self._start(self._ask_once(peer))

    def is_asked(self, peer: str) -> bool:
        """Whether it is asked again as long as it cannot be used; its connection is kept without hand-offs."""
        return peer in self._offered or peer in self._watched

    def is_watched(self, peer: str) -> bool:
        """Whether it is one of --prefill, by whatever name its operator gave it there; the others are named by routers, which
        know them by the address that they registered under."""
        return peer in self._watched

    async def _ask_forever(self, peer: str) -> None:
        while True:
            await self._ask(peer)
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _ask_once(self, peer: str) -> None:
        try:
            await self._ask(peer)
            await asyncio.sleep(PROBE_INTERVAL_S)
        finally:
            self._asking.discard(peer)
