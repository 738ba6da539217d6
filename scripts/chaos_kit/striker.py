"""Strikes the fleet by a seeded script: each kind once per round, rounds spread evenly over the requests.

A strike waits for a transfer of its victim and falls in the middle of it; when none comes in time it falls anyway. The next one
waits until the fleet is whole again, and a worker that decodes is not struck while requests live that the last such strike has
hit: a request that sees two workers go down is refused by design.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic

from chaos_kit.fleet import Fleet
from chaos_kit.kinds import ALL_PREFILL, LAST_PREFILL, SCRIPTED
from chaos_kit.member import Member
from chaos_kit.proxy import Connection, Proxy, Weather
from chaos_kit.sockets import has_port
from chaos_kit.traffic import Traffic

AIM_S = 6.0  # wait for a transfer to strike
AHEAD, AHEAD_AIMING = 2, 4  # strikes by which the traffic may be ahead of the script, and while one waits for a transfer
WHOLE_S = 90.0
MISSED_S = 15.0
SHORT_S, LONG_S = 0.5, 2.0  # below and above the silence that makes a peer dead
HOLE_S = 2.5
FALLEN_S = 15.0  # from the error of an engine to the end of its process, which waits for a core
_WEATHERS = {
    "stall": Weather.STALL,
    "black_hole": Weather.BLACK_HOLE,
    "starve_prefill": Weather.STARVE,
    "slow_reader": Weather.SLOW,
    "delay": Weather.DELAY,
}


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault of the script, after it fell. `live`: in the middle of a transfer."""

    kind: str
    victim: str
    live: bool
    at_s: float
    whole_after_s: float


class Striker:
    """Runs the script beside the traffic."""

    def __init__(
        self, fleet: Fleet, traffic: Traffic, kinds: tuple[str, ...], *, rounds: int, requests: int, seed: int
    ) -> None:
        self.strikes: list[Strike] = []
        self.problems: list[str] = []
        self._fleet = fleet
        self._traffic = traffic
        self._rng = random.Random(f"strikes {seed}")
        self._script = self._write(tuple(kind for kind in SCRIPTED if kind in kinds), rounds)
        self._step = requests / (len(self._script) + AHEAD_AIMING)
        self._aiming = False
        self._turns = Counter({kind: self._rng.randrange(2) for kind in SCRIPTED})
        self._hit: frozenset[int] = frozenset()  # visits that were in flight at the last strike on D

    def _write(self, kinds: tuple[str, ...], rounds: int) -> list[str]:
        script: list[str] = []
        for _ in range(rounds):
            script += self._rng.sample(kinds, len(kinds))
        return script

    def allowed(self) -> int:
        """Requests that may have been started: the traffic must not be over before the faults are."""
        ahead = AHEAD_AIMING if self._aiming else AHEAD
        done = len(self.strikes) == len(self._script)
        return 2**31 if done else int((len(self.strikes) + ahead) * self._step) + 8

    async def run(self) -> None:
        """The whole script."""
        for number, kind in enumerate(self._script, 1):
            while self._traffic.num_started < number * self._step:
                await asyncio.sleep(0.02)
            await self._strike(kind)

    async def _strike(self, kind: str) -> None:
        began_s = monotonic()
        victim = self._choose(kind)
        if victim in self._fleet.decode:
            while self._hit & self._traffic.in_flight:
                await asyncio.sleep(0.02)
        action, after = self._actions(kind, victim)
        if kind == LAST_PREFILL:
            await self._leave_alone(victim)

        def blow() -> None:
            action()
            if victim in self._fleet.decode:
                self._hit = frozenset(self._traffic.in_flight)

        live = await self._amid_transfer(victim, blow)
        struck_s = monotonic()
        try:
            await after()
            await self._fleet.until_whole(WHOLE_S)
        except RuntimeError as error:
            self.problems.append(f"after {kind} of {victim.name}: {error}")
        self.strikes.append(
            Strike(kind=kind, victim=victim.name, live=live, at_s=struck_s - began_s, whole_after_s=monotonic() - struck_s)
        )

    def _choose(self, kind: str) -> Member:
        fleet = self._fleet
        role = kind.rpartition("_")[2]
        pool = {"prefill": fleet.prefill, "decode": fleet.decode, "router": fleet.routers}.get(role, fleet.workers)
        self._turns[kind] += 1
        return pool[self._turns[kind] % len(pool)]

    def _actions(self, kind: str, victim: Member) -> tuple[Callable[[], None], Callable[[], Awaitable[None]]]:
        """What happens at once, and what follows until things are as before."""
        fleet, proxy = self._fleet, victim.proxy
        if kind == LAST_PREFILL:
            assert proxy is not None
            return proxy.cut, lambda: _restart(fleet, self._others(victim))
        if kind.startswith("kill"):
            victims = fleet.prefill if kind == ALL_PREFILL else [victim]
            return lambda: _each(victims, fleet.kill), lambda: _restart(fleet, victims)
        if kind.startswith("break"):
            return lambda: fleet.break_engine(victim), lambda: _fall(fleet, victim)
        if kind.startswith("restart"):
            return _nothing, lambda: fleet.restart(victim, drains=True)
        seconds = self._rng.choice((SHORT_S, LONG_S))
        if kind.startswith("freeze"):
            return victim.freeze, lambda: _later(seconds, victim.thaw)
        if kind.startswith("hang"):
            return victim.hang, lambda: _later(seconds, victim.recover)
        assert proxy is not None, f"{kind} needs a proxy, {victim.name} has none"
        if kind == "sever":
            return proxy.cut, _at_once
        weather = _WEATHERS[kind]
        seconds = HOLE_S if weather in (Weather.BLACK_HOLE, Weather.STARVE) else seconds
        return lambda: proxy.set_weather(weather), lambda: _later(seconds, lambda: proxy.set_weather(Weather.CLEAR))

    def _others(self, victim: Member) -> list[Member]:
        return [member for member in self._fleet.prefill if member is not victim]

    async def _leave_alone(self, victim: Member) -> None:
        """Every other P dies; new requests come to know this one alone."""
        others = self._others(victim)
        _each(others, self._fleet.kill)
        try:
            await self._fleet.until_missed(others, MISSED_S)
        except RuntimeError as error:
            self.problems.append(f"before {LAST_PREFILL} of {victim.name}: {error}")

    async def _amid_transfer(self, victim: Member, blow: Callable[[], None]) -> bool:
        """Blow when KV passes to or from the victim (for a router: any KV); False when it fell without."""
        fallen = asyncio.Event()

        def on_transfer(proxy: Proxy, connection: Connection) -> None:
            if not fallen.is_set() and self._concerns(victim, proxy, connection):
                fallen.set()
                blow()

        self._fleet.on_transfer, self._aiming = on_transfer, True
        try:
            async with asyncio.timeout(AIM_S):
                await fallen.wait()
        except TimeoutError:
            blow()
            return False
        finally:
            self._fleet.on_transfer, self._aiming = _nothing, False
        return True

    def _concerns(self, victim: Member, proxy: Proxy, connection: Connection) -> bool:
        if proxy not in [member.proxy for member in self._fleet.prefill]:
            return False  # what D sends to routers is tokens
        if victim.proxy is None or victim.proxy is proxy:
            return True
        return victim in self._fleet.decode and has_port(victim.pid, connection.client_port)


def _each(victims: list[Member], action: Callable[[Member], None]) -> None:
    for member in victims:
        action(member)


async def _restart(fleet: Fleet, victims: list[Member]) -> None:
    await asyncio.gather(*(fleet.restart(member) for member in victims))


async def _fall(fleet: Fleet, victim: Member) -> None:
    try:
        await fleet.until_fallen(victim, FALLEN_S)
    finally:
        await fleet.restart(victim)


async def _later(seconds: float, action: Callable[[], None]) -> None:
    await asyncio.sleep(seconds)
    action()


async def _at_once() -> None:
    """Nothing has to be undone."""


def _nothing(*_: object) -> None:
    """Nothing."""
