"""Seeded clients, so many at a time, held back when they run ahead of the faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from chaos_kit.catalogue import Entry
from chaos_kit.client import Clients
from chaos_kit.outcome import Fate, Outcome, Visit

AWAY_SHARE = 0.15  # clients that go away
SALTED_SHARE = 0.7  # requests that find nothing in a prefix cache: their KV has to travel
PRIORITIES = 3


def make_visits(count: int, catalogue: Sequence[Entry], *, seed: int) -> list[Visit]:
    """`count` requests, drawn from the catalogue."""
    rng = random.Random(seed)
    visits = []
    for number in range(count):
        over_http = rng.random() < 0.4
        fate = Fate.STAYS
        if rng.random() < AWAY_SHARE:
            fate = Fate.LEAVES if over_http else rng.choice((Fate.CANCELS, Fate.CANCELS, Fate.ABORTS, Fate.ABORTS, Fate.LEAVES))
        visits.append(
            Visit(
                number=number,
                entry=rng.randrange(len(catalogue)),
                fate=fate,
                after_s=rng.choice((0.02, 0.1, 0.5)) * rng.random(),
                over_http=over_http,
                stream=rng.random() < 0.8 or fate is not Fate.STAYS,
                priority=rng.randrange(PRIORITIES),
                cache_salt=f"{seed}-{number}" if rng.random() < SALTED_SHARE else "",
            )
        )
    return visits


class Traffic:
    """Runs visits in order. `allowed()` says how many may have been started."""

    def __init__(self, clients: Clients, catalogue: Sequence[Entry], deadlines_s: Sequence[float], *, at_once: int) -> None:
        self.outcomes: list[Outcome] = []
        self.in_flight: set[int] = set()  # numbers of visits
        self.num_started = 0
        self._clients = clients
        self._catalogue = catalogue
        self._deadlines_s = deadlines_s
        self._at_once = at_once

    async def run(self, visits: Sequence[Visit], allowed: Callable[[], int] | None = None) -> None:
        """Until every visit has ended."""
        limit = asyncio.Semaphore(self._at_once)
        async with asyncio.TaskGroup() as group:
            for visit in visits:
                await limit.acquire()
                while allowed is not None and self.num_started >= allowed():
                    await asyncio.sleep(0.02)
                self.num_started += 1
                group.create_task(self._one(visit, limit))

    async def _one(self, visit: Visit, limit: asyncio.Semaphore) -> None:
        outcome = Outcome(visit=visit)
        self.in_flight.add(visit.number)
        try:
            await self._clients.run(outcome, self._catalogue[visit.entry], self._deadlines_s[visit.entry])
        finally:
            self.in_flight.discard(visit.number)
            limit.release()
        self.outcomes.append(outcome)
