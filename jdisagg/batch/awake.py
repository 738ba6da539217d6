"""Time that stands still while this process does (Ctrl-Z, and fg): that is no absence of a server's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple

from jdisagg.core.looks import Looks

LOOK_S = 0.25  # between two looks
MUCH = 0.1  # of the time that a request took: so much in which this process stood still is why it is late


class Moment(NamedTuple):
    """One reading of both clocks."""

    passed_s: float  # monotonic
    awake_s: float


class AwakeClock:
    """Of one event loop. Somebody has to look at it often while anybody goes by it: see `watched`."""

    def __init__(self) -> None:
        self._looks = Looks(num_recent=0)
        self._num_watched = 0
        self._watch: asyncio.Task[None] | None = None

    def now_s(self) -> float:
        """The time that this process was awake."""
        return self.moment().awake_s

    def moment(self) -> Moment:
        """Now. It is read once, or a moment between two looks would be much of a short request."""
        return Moment(passed_s := monotonic(), self._looks.awake_s(passed_s))

    def stood_still(self, since: Moment, limit_s: float) -> bool:
        """Whether this process did for much of the time since then, or for so long that what was granted `limit_s` had not all
        of it."""
        now = self.moment()
        took_s, awake_s = now.passed_s - since.passed_s, now.awake_s - since.awake_s
        return took_s - awake_s > MUCH * took_s or awake_s < limit_s <= took_s

    @contextmanager
    def watched(self) -> Iterator[None]:
        """One task looks for all who are in here."""
        self._num_watched += 1
        if self._watch is None:
            self._watch = asyncio.create_task(self._look())
        try:
            yield
        finally:
            self._num_watched -= 1
            if not self._num_watched:
                self._watch.cancel()
                self._watch = None

    async def _look(self) -> None:
        while True:
            self.moment()
            await asyncio.sleep(LOOK_S)
