"""Streams go on while the network between hosts breaks and heals.

answers of the undisturbed fleet -> streams begin -> cut, more streams begin -> `hold_s` -> healed -> all ended, whole again
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

from chaos_kit.catalogue import Entry
from chaos_kit.choice import Choice
from chaos_kit.client import HANG, TOO_LATE, TRANSPORT, Clients
from chaos_kit.cuts import Cut
from chaos_kit.host_fleet import HostFleet
from chaos_kit.network import Network
from chaos_kit.outcome import Choices, Fate, Outcome, Visit, flaws_in

LIMIT_S = 60.0  # of one answer; later is a hang
AT_ONCE = 6  # while answers are computed that nothing disturbs
BEFORE_S, BEFORE_SHARE = 1.0, 0.4  # of the streams begin so long before the cut: they are to be hit, not only late
WHOLE_S = 60.0  # D asks a P whose KV did not come last, for half a minute
AT_REST_S = 15.0
UNNAMED = (HANG, TOO_LATE, TRANSPORT)  # errors that no server said


@dataclass(frozen=True, kw_only=True)
class Survived:
    """What became of everything while there was one cut. Seconds."""

    cut: str
    may_fail: bool
    became: dict[str, int]
    named: int  # streams that failed with an error that says why
    slowest_s: float
    whole_s: float  # after it was healed
    missing: str  # of the fleet, after WHOLE_S
    ended: tuple[str, ...]  # processes
    rungs: dict[str, int]
    details: tuple[str, ...] = ()  # of what was not exact

    @property
    def num_streams(self) -> int:
        """All of them."""
        return sum(self.became.values())

    @property
    def num_exact(self) -> int:
        """As they would have been without the cut."""
        return self.became.get("exact", 0)

    @property
    def num_bad(self) -> int:
        """Neither exact nor failed by name: a token was wrong, lost or there twice, or a client was left hanging or cut off."""
        return self.num_streams - self.num_exact - self.named

    @property
    def ok(self) -> bool:
        """As it must be."""
        return not (self.num_bad or self.missing or self.ended) and (self.may_fail or not self.named)

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return asdict(self) | {"ok": self.ok}


@dataclass
class HostDrill:
    """Cuts the network of one fleet, one cut at a time."""

    fleet: HostFleet
    network: Network
    clients: Clients  # of its router
    entries: Sequence[Entry]
    outcomes: list[Survived] = field(default_factory=list)
    left: str = ""  # held by somebody for a request that is over
    _answers: list[Outcome] = field(default_factory=list)
    _rng: random.Random = field(default_factory=lambda: random.Random(43))
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def is_fine(self) -> bool:
        """Everything was as it must be, and nothing was left."""
        return all(outcome.ok for outcome in self.outcomes) and not self.left

    @property
    def calm_s(self) -> float:
        """The slowest answer that nothing disturbed."""
        return max(answer.seconds for answer in self._answers)

    async def undisturbed(self) -> None:
        """The right answers. Raises RuntimeError when one fails, or when no KV crosses the network: that would show nothing."""
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> Outcome:
            async with limit:
                return await self._ask(number)

        self._answers = await asyncio.gather(*map(one, range(len(self.entries))))
        failed = [f"{answer.error}: {answer.detail}" for answer in self._answers if not answer.well]
        if failed or not await self.fleet.kv_bytes():
            raise RuntimeError(
                f"undisturbed, {len(failed)} streams failed: {failed[:1]}" if failed else "no KV crossed the network"
            )

    async def strike(self, cut: Cut, hold_s: float) -> Survived:
        """Everything is asked again, one cut for `hold_s`, and everything after it."""
        before = await self.fleet.rungs()
        tasks = [asyncio.create_task(self._ask(number, self._begin_s(hold_s))) for number in range(len(self.entries))]
        await asyncio.sleep(BEFORE_S)
        try:
            await self._broken(cut, hold_s)
        finally:
            await asyncio.to_thread(self.network.heal)
        healed_s = monotonic()
        missing = await self.fleet.until_whole(WHOLE_S)
        whole_s = monotonic() - healed_s
        answers = await asyncio.gather(*tasks)
        wanted = [answer.choices for answer in self._answers]
        fates = [became(*one) for one in zip(answers, self.entries, wanted, strict=True)]
        ended = self.fleet.ended()
        told = [
            f"question {number}: {fate}: {answer.detail or _beside(answer.choices, wanted[number])}"[:600]
            for number, (fate, answer) in enumerate(zip(fates, answers, strict=True))
            if fate != "exact"
        ]
        outcome = Survived(
            cut=cut.name,
            may_fail=cut.may_fail,
            became=dict(Counter(fates)),
            named=sum(fate == answer.error and fate not in UNNAMED for fate, answer in zip(fates, answers, strict=True)),
            slowest_s=max(answer.seconds for answer in answers),
            whole_s=whole_s,
            missing=missing,
            ended=tuple(ended),
            rungs=dict(await self.fleet.rungs() - before),
            details=(*told, *(f"{name} ended: {log}" for name, log in ended.items())),
        )
        self.outcomes.append(outcome)
        return outcome

    async def at_rest(self) -> None:
        """Wait until nobody holds anything for a request, and note what is held for too long."""
        self.left = await self.fleet.until_at_rest(AT_REST_S)

    async def _broken(self, cut: Cut, hold_s: float) -> None:
        until_s = monotonic() + hold_s
        await asyncio.to_thread(cut.begin, self.network)
        while (left_s := until_s - monotonic()) > 0:
            await asyncio.sleep(min(left_s, cut.loose_s or left_s))
            if cut.loose_s is not None:
                await asyncio.to_thread(self.network.heal)
                await asyncio.sleep(cut.loose_s)
                await asyncio.to_thread(cut.begin, self.network)

    def _begin_s(self, hold_s: float) -> float:
        before = self._rng.random() < BEFORE_SHARE
        return BEFORE_S * self._rng.random() if before else BEFORE_S + hold_s * self._rng.random()

    async def _ask(self, number: int, after_s: float = 0.0) -> Outcome:
        await asyncio.sleep(after_s)
        sent = next(self._numbers)
        visit = Visit(
            number=sent,
            entry=number,
            fate=Fate.STAYS,
            after_s=0,
            over_http=True,
            stream=True,
            priority=0,
            cache_salt=f"hosts-{sent}",
        )
        outcome = Outcome(visit=visit)
        await self.clients.run(outcome, self.entries[number], LIMIT_S)
        return outcome


def became(outcome: Outcome, entry: Entry, wanted: Choices) -> str:
    """`exact`, the name of its error behind nothing but what is right, or the name of a flaw, in capitals."""
    if flaws := flaws_in(outcome, entry, wanted, exact=True):
        return flaws[-1].name
    return outcome.error or "exact"


def _beside(got: Choices, wanted: Choices) -> str:
    """Where each choice differs first, in words."""
    told = []
    for number in sorted(wanted.keys() | got.keys()):
        mine, right = got.get(number, Choice()), wanted.get(number, Choice())
        pairs = itertools.zip_longest(mine.tokens, right.tokens)
        values = itertools.zip_longest(mine.logprobs, right.logprobs)
        for what, both in (("token", pairs), ("logprob", values)):
            found = next(((at, one, right_one) for at, (one, right_one) in enumerate(both) if one != right_one), None)
            told += [f"choice {number}, {what} {found[0]}: {found[1]} instead of {found[2]}"] if found else []
    return "; ".join(told) or "text, finish or counts differ"
