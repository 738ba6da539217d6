"""Which prefill workers a decode worker asks whether they are there, before any request needs one.

Those of --prefill are asked for ever. Those that routers tell of are asked when they are new, and again whenever they failed,
until they answer: a router hears their heartbeats, which does not mean that this worker reaches them. One that has answered is
asked again now and then, unless a hand-off hears it, so that a network that fails while there is nothing to do is known before
the next request. All that goes on while no router speaks: what they told of last is what there is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 1.0
AGAIN_S = 5.0  # more or less: among 64 prefill and 64 decode workers each answers, or says, 13 Hellos a second
_SPREAD = 0.4  # of that time
LOOK_S = 0.25  # between two looks at whose turn it is


class Presence:
    """`is_asked` on any thread, everything else on the loop."""

    def __init__(
        self,
        *,
        ask: Callable[[str], Awaitable[None]],
        is_good: Callable[[str], bool],
        is_heard: Callable[[str], bool],
        start: Callable[[Coroutine[Any, Any, None]], None],
        draw: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        """`ask` says Hello to a peer, and raises only what is a bug; `is_good`: the peer could be used the last time that it
        was spoken to; `is_heard`: something goes on with it that would find out otherwise; `start` runs a task; `draw`: from
        [0, 1); `clock`: monotonic seconds."""
        self._ask = ask
        self._is_good = is_good
        self._is_heard = is_heard
        self._start = start
        self._draw = draw
        self._clock = clock
        self._watched: set[str] = set()
        self._offered: frozenset[str] = frozenset()
        self._asking: set[str] = set()  # or asked a moment ago
        self._due_s: dict[str, float] = {}  # of those that are told of and answered
        self._is_looking = False
        self._buggy: set[str] = set()  # the latest question there ended in a bug

    def watch(self, peer: str) -> None:
        """Ask it for ever."""
        self._watched.add(peer)
        self._start(self._ask_forever(peer))

    def offer(self, peers: frozenset[str]) -> None:
        """These are all that routers tell of, until it is called again."""
        self._offered = peers
        self._due_s = {peer: due_s for peer, due_s in self._due_s.items() if peer in peers}
        self._look()
        if peers and not self._is_looking:
            self._is_looking = True
            self._start(self._look_again_and_again())

    def is_asked(self, peer: str) -> bool:
        """Whether it is asked again as long as it cannot be used; its connection is kept without hand-offs."""
        return peer in self._offered or peer in self._watched

    def is_watched(self, peer: str) -> bool:
        """Whether it is one of --prefill, by whatever name its operator gave it there; the others are named by routers, which
        know them by the address that they registered under."""
        return peer in self._watched

    async def _look_again_and_again(self) -> None:
        try:
            while self._offered:
                await asyncio.sleep(LOOK_S)
                self._look()
        finally:
            self._is_looking = False

    def _look(self) -> None:
        now_s = self._clock()
        for peer in self._offered - self._watched - self._asking:
            if self._is_good(peer) and (peer not in self._due_s or self._is_heard(peer)):
                self._due_s[peer] = now_s + AGAIN_S * (1.0 + _SPREAD * (self._draw() - 0.5))
            elif not self._is_good(peer) or now_s >= self._due_s[peer]:
                self._due_s.pop(peer, None)
                self._asking.add(peer)
                self._start(self._ask_once(peer))

    async def _ask_forever(self, peer: str) -> None:
        while True:
            await self._ask_and_rest(peer)

    async def _ask_once(self, peer: str) -> None:
        try:
            if peer in self._offered:  # still
                await self._ask_and_rest(peer)
        finally:
            self._asking.discard(peer)

    async def _ask_and_rest(self, peer: str) -> None:
        """A bug in one question must not be the end of them. Said when it is news."""
        try:
            await self._ask(peer)
            self._buggy.discard(peer)
        except Exception:
            if peer not in self._buggy:
                self._buggy.add(peer)
                log.exception("asking prefill peer %s whether it is there failed", peer)
        await asyncio.sleep(PROBE_INTERVAL_S)
