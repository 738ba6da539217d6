"""What processes hold, read from outside and from their own ledgers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from time import monotonic
from typing import Any

import httpx

from chaos_kit.fleet import Fleet
from chaos_kit.member import Member
from chaos_kit.sockets import descriptors_of

SAMPLE_S = 1.0
SETTLE_S = 15.0  # until nothing is held for requests: a lease of 4 s and a tick, on a machine that may stand still
PATIENCE_S = 10.0  # until no more is held than at first
GRPC_THREADS = "event_engine"  # its pool grows and shrinks with load and machine
SLACK = {"threads": 2, "descriptors": 6, "sockets": 4}  # a connection more or less to each peer
RSS_SLACK_BYTES = 24 * 2**20
RSS_MIN_SAMPLES = 30
GAUGES = ("jdisagg_kv_pages_used", "jdisagg_leases", "jdisagg_published_bytes", "jdisagg_host_kv_held_tokens")
COUNTERS = (
    "jdisagg_recoveries_total",
    "jdisagg_transfer_failures_total",
    "jdisagg_transfer_bytes_total",
    "jdisagg_retractions",
    "jdisagg_host_kv_tokens",
    "jdisagg_compiles_after_ready_total",
)


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a process holds of the system."""

    threads: int
    descriptors: int
    sockets: int
    rss_bytes: int

    def no_more_than(self, other: Held) -> bool:
        """Memory aside."""
        return all(getattr(self, name) <= getattr(other, name) for name in SLACK)


def held_by(pid: int) -> Held:
    """Now, without the threads whose number grpc chooses by itself. Raises OSError when the process is gone."""
    names, threads = descriptors_of(pid), 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError):
            threads += not Path(f"/proc/{pid}/task/{thread}/comm").read_text().startswith(GRPC_THREADS)
    rss_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Held(
        threads=threads,
        descriptors=len(names),
        sockets=sum(name.startswith("socket:") for name in names),
        rss_bytes=rss_pages * os.sysconf("SC_PAGE_SIZE"),
    )


def shared_memory() -> frozenset[str]:
    """Names in /dev/shm."""
    return frozenset(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else frozenset()


@dataclass
class Watch:
    """Samples of every process while the run goes on; keys are (member, incarnation)."""

    rss: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=dict)
    counters: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)  # the last that were seen
    before: dict[str, float] = field(default_factory=dict)  # their sums when the run began: a fleet may have had runs before

    async def begin(self, fleet: Fleet) -> None:
        """Counts from here on."""
        await self.sample(fleet)
        self.before = self._sums("")

    async def run(self, fleet: Fleet) -> None:
        """Until cancelled."""
        while True:
            await self.sample(fleet)
            await asyncio.sleep(SAMPLE_S)

    async def sample(self, fleet: Fleet) -> None:
        """One sample of everybody who is up."""
        await asyncio.gather(*(self._sample(member) for member in fleet.members if member.up and not member.frozen))

    async def _sample(self, member: Member) -> None:
        key = (member.name, member.incarnation)
        with suppress(OSError, httpx.HTTPError):  # struck down meanwhile
            self.rss.setdefault(key, []).append((monotonic(), held_by(member.pid).rss_bytes))
            samples = await member.metrics()
            self.counters[key] = {name: value for name, value in samples.items() if name.startswith(COUNTERS)}

    def total(self, prefix: str) -> dict[str, float]:
        """What was counted since `begin` by counters that begin so, over all processes there were."""
        sums = {name: value - self.before.get(name, 0.0) for name, value in self._sums(prefix).items()}
        return {name: value for name, value in sums.items() if value}

    def _sums(self, prefix: str) -> dict[str, float]:
        sums: dict[str, float] = {}
        for counters in self.counters.values():
            for name, value in counters.items():
                if name.startswith(prefix):
                    sums[name] = sums.get(name, 0.0) + value
        return sums

    def growing(self) -> list[str]:
        """Processes whose memory climbs in the later two thirds of their life."""
        found = []
        for (name, incarnation), samples in self.rss.items():
            later = _later(samples)
            if len(later) >= RSS_MIN_SAMPLES and (growth := _fitted_growth(later)) > RSS_SLACK_BYTES:
                found.append(
                    f"{name}-{incarnation}: RSS grew by {growth / 2**20:.0f} MiB in {later[-1][0] - later[0][0]:.0f} s"
                )
        return found

    def lives(self) -> dict[str, tuple[int, int]]:
        """By role: processes there were, and those of them that lived long enough to be judged by `growing`."""
        found: dict[str, tuple[int, int]] = {}
        for (name, _), samples in self.rss.items():
            count, judged = found.get(name[0], (0, 0))
            found[name[0]] = count + 1, judged + (len(_later(samples)) >= RSS_MIN_SAMPLES)
        return found


def _later(samples: Sequence[tuple[float, int]]) -> Sequence[tuple[float, int]]:
    """Without those of a process that still warms up."""
    return samples[len(samples) // 3 :]


def _fitted_growth(samples: Sequence[tuple[float, int]]) -> float:
    """Bytes that a straight line through the samples gains over their span."""
    times_s, sizes = zip(*samples, strict=True)
    return linear_regression(times_s, sizes).slope * (times_s[-1] - times_s[0])


def live_requests(state: dict[str, Any]) -> dict[str, Any]:
    """Whatever /debug/state shows of requests that are not over; empty values are left out."""
    parts = {name: state.get(name) for name in ("streams", "requests", "flights")}
    parts["sequences"] = (state.get("scheduler") or {}).get("sequences")
    handoff = state.get("handoff") or {}
    parts |= {f"handoff {name}": handoff.get(name) for name in ("handoffs", "replies", "requests")}
    return {name: part for name, part in parts.items() if part}


async def at_rest(members: Sequence[Member]) -> list[str]:
    """Wait until none of them holds anything for somebody; what is left at the end of the patience."""
    end_s = monotonic() + SETTLE_S
    while True:
        parts = await asyncio.gather(*map(_left_over, members))
        found = [f"{member.name}: {text}" for member, part in zip(members, parts, strict=True) for text in part]
        if not found or monotonic() > end_s:
            return found
        await asyncio.sleep(0.1)


async def _left_over(member: Member) -> list[str]:
    try:
        return left_over(await member.metrics(), await member.state())
    except (httpx.HTTPError, ValueError) as error:
        return [f"does not answer: {error!r}"]


def left_over(metrics: Mapping[str, float], state: dict[str, Any]) -> list[str]:
    """What a process still holds for somebody, by its /metrics and /debug/state; empty when it is at rest."""
    if "error" in state:
        return [f"does not answer: {state['error']}"]
    found = [f"{name} = {metrics[name]:g}" for name in GAUGES if metrics.get(name)]
    handoff = state.get("handoff") or {}
    held = {name: handoff[name] for name in ("published_bytes", "buffered_bytes") if handoff.get(name)}
    return found + [f"{name}: {str(part)[:200]}" for name, part in (live_requests(state) | held).items()]


@dataclass(frozen=True)
class Baseline:
    """What one process of each role holds at rest, at most, once it has served."""

    by_role: dict[str, Held]
    shm: frozenset[str]

    @classmethod
    def of(cls, fleet: Fleet) -> Baseline:
        """As it is now."""
        roles: dict[str, list[Held]] = {}
        for member in fleet.members:
            roles.setdefault(member.name[0], []).append(held_by(member.pid))
        most = {
            role: Held(**{name: max(getattr(held, name) for held in many) for name in vars(many[0])})
            for role, many in roles.items()
        }
        return cls(most, shared_memory())

    async def exceeded(self, fleet: Fleet) -> list[str]:
        """What is held beyond it, once it stays so."""
        end_s = monotonic() + PATIENCE_S
        while (found := self._exceeded_now(fleet)) and monotonic() < end_s:
            await asyncio.sleep(0.5)
        return found

    def _exceeded_now(self, fleet: Fleet) -> list[str]:
        found = [f"/dev/shm: {name}" for name in sorted(shared_memory() - self.shm)]
        for member in fleet.members:
            who = f"{member.name}-{member.incarnation}"
            try:
                now, before = held_by(member.pid), self.by_role[member.name[0]]
            except OSError:  # soon the fleet knows, and has another in its place
                found.append(f"{who}: has died")
                continue
            for name, slack in SLACK.items():
                if getattr(now, name) > getattr(before, name) + slack:
                    found.append(f"{who}: {getattr(now, name)} {name}, was {getattr(before, name)}")
        return found
