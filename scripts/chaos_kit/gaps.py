"""How long clients wait when a worker is killed, frozen or swallowed by a black hole, and whether anybody else notices.

A load runs until the strike can fall into the work of its victim. *Struck* are the streams that were recovered: their gap is
the longest wait that ended after the strike. *Bystanders* were decoding then and were not recovered: the waits between their
tokens stand beside those of the same load, undisturbed, in the same session. A *re-prefill* is the time to the first token of
fresh prompts as long as the struck streams were, all sent at once, once the fleet is whole again.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import nan
from time import monotonic
from typing import Any

import numpy as np

from chaos_kit.catalogue import Entry
from chaos_kit.cell import Answers
from chaos_kit.fleet import Fleet
from chaos_kit.leaks import at_rest
from chaos_kit.lookout import Lookout
from chaos_kit.member import Member
from chaos_kit.proxy import Weather
from chaos_kit.stages import questions
from chaos_kit.stream import Stream

WHOLE_S, START_S = 90.0, 20.0
LEAST_S = 1.5  # of a freeze or a black hole: beyond the silence that makes a peer dead
TARGET_BASE_S, TARGET_SLACK_S = 1.0, 0.25  # p99 of the gap: both and one re-prefill
TARGET_ITL_RATIO = 1.5


class Trouble(Enum):
    """What happens to a worker."""

    KILL = "kill -9"
    STOP = "SIGSTOP"
    HOLE = "black hole"


@dataclass(frozen=True, kw_only=True)
class Load:
    """Streams that run beside each other. `long` ones decode; `late` ones come once those do and need a prefill."""

    long: tuple[Entry, ...]
    late: tuple[Entry, ...] = ()


LOADS = {  # for P one late prompt each: what is waited for is one prefill, not a queue of them
    "D": Load(long=tuple(itertools.chain(*(questions(2, length, 120, seed=21) for length in (5, 20, 70, 150))))),
    "P": Load(long=questions(4, 20, 150, seed=22), late=questions(2, 320, 8, seed=23)),
}
PREFILLS = questions(1, 500, 2, seed=24)  # cut to length


@dataclass
class Figures:
    """Of one kind of trouble. Seconds."""

    gaps_s: list[float] = field(default_factory=list)
    prefills_s: list[float] = field(default_factory=list)
    bystanders_s: list[float] = field(default_factory=list)
    became: dict[str, int] = field(default_factory=dict)
    rungs: dict[str, int] = field(default_factory=dict)
    strikes: int = 0
    missed: int = 0  # strikes that hit no stream
    leaks: list[str] = field(default_factory=list)


def spread(values: Sequence[float]) -> dict[str, float]:
    """p50, p99, max in ms and how many."""
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}  # each a wait that somebody had: of few waits p99 is the longest
    found = {name: float(np.quantile(values, share, method="higher")) if values else nan for name, share in shares.items()}
    return {name: round(value * 1e3, 1) for name, value in found.items()} | {"count": len(values)}


def everything_asked() -> tuple[Entry, ...]:
    """All questions whose answers are compared."""
    return tuple(itertools.chain(*((*load.long, *load.late) for load in LOADS.values())))


class GapDrill:
    """Strikes workers of one fleet under load. `figures` by (role, trouble), `calm_s` by role."""

    def __init__(self, fleet: Fleet, answers: Answers) -> None:
        self.figures: dict[tuple[str, Trouble], Figures] = {}
        self.calm_s: dict[str, list[float]] = {role: [] for role in LOADS}
        self._fleet = fleet
        self._answers = answers
        self._rng = random.Random(1)
        self._numbers = itertools.count()

    async def undisturbed(self, role: str) -> None:
        """The load once, nobody struck. Raises RuntimeError when a stream is not exact."""
        streams, tasks, _ = await self._begin(role)
        since_s = monotonic()
        await asyncio.gather(*tasks)
        bad = [one.error for one in streams if one.became(self._answers[one.entry.prompt]) != "exact"]
        if bad:
            raise RuntimeError(f"not exact without any trouble: {bad}")
        for one in streams[: len(LOADS[role].long)]:
            self.calm_s[role] += one.waits_s(since_s)

    async def strike(self, role: str, trouble: Trouble) -> None:
        """One strike, and everything healed after it."""
        figures = self.figures.setdefault((role, trouble), Figures())
        streams, tasks, victim = await self._begin(role)
        struck_s = monotonic()
        self._hurt(victim, trouble)
        if trouble is not Trouble.KILL:
            await asyncio.sleep(LEAST_S)
        await asyncio.gather(*tasks)
        await self._heal(victim, trouble)
        self._note(figures, streams, role, struck_s)
        figures.leaks += await at_rest(self._fleet.members)
        lengths = [len(one.entry.prompt) + one.tokens_before_gap(struck_s) for one in streams if one.recoveries]
        figures.prefills_s += await self._prefill(lengths)

    async def _begin(self, role: str) -> tuple[list[Stream], list[asyncio.Task[Stream]], Member]:
        """The load, up to the moment of the strike, and whom it hits."""
        load, number = LOADS[role], next(self._numbers)
        streams = [Stream(name=f"gap-{number}-{i}", entry=entry) for i, entry in enumerate((*load.long, *load.late))]
        tasks = [self._send(one) for one in streams[: len(load.long)]]
        async with asyncio.timeout(START_S):
            while any(not one.times_s for one in streams[: len(load.long)]):
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05 + 0.2 * self._rng.random())
        tasks += [self._send(one) for one in streams[len(load.long) :]]
        if role == "D":
            return streams, tasks, self._fleet.decode[number % len(self._fleet.decode)]
        return streams, tasks, await self._busy_prefill(streams[len(load.long) :])

    async def _busy_prefill(self, late: list[Stream]) -> Member:
        """The P that one of the late ones is at, seen in its state."""
        wanted = self._rng.choice(late)
        lookout = Lookout(self._fleet, wanted.name)
        while wanted.ended_s is None and lookout.seen_prefill is None:
            await lookout.look()
        return lookout.seen_prefill or self._fleet.prefill[0]

    def _send(self, stream: Stream) -> asyncio.Task[Stream]:
        return asyncio.create_task(stream.run(self._fleet.pick(0).grpc))

    def _hurt(self, victim: Member, trouble: Trouble) -> None:
        if trouble is Trouble.KILL:
            self._fleet.kill(victim)
        elif trouble is Trouble.STOP:
            victim.freeze()
        else:
            assert victim.proxy is not None
            victim.proxy.set_weather(Weather.BLACK_HOLE)

    async def _heal(self, victim: Member, trouble: Trouble) -> None:
        if trouble is Trouble.KILL:
            await self._fleet.restart(victim)
        elif trouble is Trouble.STOP:
            victim.thaw()
        else:
            assert victim.proxy is not None
            victim.proxy.set_weather(Weather.CLEAR)
            victim.proxy.cut()  # idle connections that were swallowed would disturb whoever uses them next
        await self._fleet.until_whole(WHOLE_S, trusted=True)  # else the next load is not split as the undisturbed one

    def _note(self, figures: Figures, streams: list[Stream], role: str, struck_s: float) -> None:
        figures.strikes += 1
        hit = any(one.recoveries for one in streams)
        figures.missed += not hit
        for one in streams:
            became = one.became(self._answers[one.entry.prompt])
            figures.became[became] = figures.became.get(became, 0) + 1
            for rung in one.recoveries:
                figures.rungs[rung] = figures.rungs.get(rung, 0) + 1
            if one.recoveries:
                figures.gaps_s.append(one.gap_s(struck_s))
        for one in streams[: len(LOADS[role].long)]:
            if hit and not one.recoveries:
                figures.bystanders_s += one.waits_s(struck_s)

    async def _prefill(self, lengths: list[int]) -> list[float]:
        """Times to the first token of fresh prompts, all at once."""
        number, whole = next(self._numbers), PREFILLS[0]
        entries = [Entry(prompt=whole.prompt[:length], sampling=whole.sampling) for length in lengths]
        streams = [Stream(name=f"prefill-{number}-{i}", entry=entry) for i, entry in enumerate(entries)]
        await asyncio.gather(*(self._send(one) for one in streams))
        return [one.times_s[0] - one.asked_s for one in streams if one.times_s]

    # --- the figures

    @property
    def is_fine(self) -> bool:
        """Every kind hit a stream, every stream was exact and nothing was left; times aside."""
        return all(
            set(figures.became) <= {"exact"} and not figures.leaks and figures.missed < figures.strikes
            for figures in self.figures.values()
        )

    def as_json(self) -> list[dict[str, Any]]:
        """One row per kind of trouble."""
        return [self._row(role, trouble, figures) for (role, trouble), figures in self.figures.items()]

    def _row(self, role: str, trouble: Trouble, figures: Figures) -> dict[str, Any]:
        gap, prefill = spread(figures.gaps_s), spread(figures.prefills_s)
        calm, bystanders = spread(self.calm_s[role]), spread(figures.bystanders_s)
        target = (TARGET_BASE_S + TARGET_SLACK_S) * 1e3 + prefill["p99"]
        ratio = round(bystanders["p99"] / calm["p99"], 2) if calm["count"] else nan
        return {
            "trouble": f"{trouble.value} of {role}",
            "strikes": figures.strikes,
            "strikes_that_hit_no_stream": figures.missed,
            "gap_ms": gap,
            "re_prefill_ms": prefill,
            "gap_target_ms": round(target, 1),
            "gap_ok": gap["p99"] <= target,
            "bystander_itl_ms": bystanders,
            "undisturbed_itl_ms": calm,
            "itl_p99_ratio": ratio,
            "itl_ok": ratio <= TARGET_ITL_RATIO,
            "became": figures.became,
            "rungs": figures.rungs,
            "leaks": figures.leaks,
        }
