"""A fleet with its right answers and its undisturbed latencies, on which any number of seeds can be run."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import httpx

from chaos_kit.catalogue import make_catalogue
from chaos_kit.client import Clients
from chaos_kit.fleet import Fleet, FleetPlan
from chaos_kit.kinds import BY_CLIENTS, IN_ROUTERS, IN_WORKERS, SCRIPTED, drill_text
from chaos_kit.leaks import Baseline, Watch, at_rest
from chaos_kit.outcome import Choices, Fate, Outcome, Visit
from chaos_kit.reference import transformers_disagree, unified_answers
from chaos_kit.striker import Striker
from chaos_kit.tally import Tally
from chaos_kit.traffic import Traffic, make_visits
from chaos_kit.verdict import Counted, Verdict
from jdisagg.core.config import Numerics

DEADLINE_FACTOR, LEAST_DEADLINE_S = 20.0, 30.0  # of the undisturbed latency; the machine may have been idle for that alone
UNDISTURBED_LIMIT_S = 60.0
PROGRESS_S = 10.0
SCRAMBLED_SHARE = 0.1  # of the pieces, where nobody looks at checksums
_DRILLED = re.compile(r"injected fault: (\w+)")
INJECTIONS = ("checksums-off", "leases-off", "attempts-ignored")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run. `injections`, some of INJECTIONS, must turn a run red."""

    plan: FleetPlan
    faults: frozenset[str]
    catalogue_size: int = 60
    transformers: int = 0  # entries that transformers judges, too
    at_once: int = 12
    injections: frozenset[str] = frozenset()


class Session:
    """Use from one event loop in the main thread; `start`, `run` per seed, `close`."""

    def __init__(self, options: Options, directory: Path, say: Callable[[str], None]) -> None:
        self.options = options
        self._say = say
        self._directory = directory
        self._http = httpx.AsyncClient(limits=httpx.Limits(max_connections=200, max_keepalive_connections=0), trust_env=False)
        self.fleet = Fleet(options.plan, directory, self._http)
        self._clients = Clients(self.fleet.pick, self._http)
        self._catalogue = make_catalogue(options.catalogue_size)
        self._answers: list[Choices] = []
        self._deadlines_s: list[float] = []
        self._baseline: Baseline | None = None
        self._exact = options.plan.numerics == Numerics.EXACT.value

    async def start(self) -> None:
        """Answers, fleet, latencies, then the drill. Raises RuntimeError when something fails before anything is broken."""
        plan = self.options.plan
        began_s = monotonic()
        self._answers = await unified_answers(plan, self._catalogue, self._directory, self._http)
        tokens = {token for answer in self._answers for choice in answer.values() for token in choice.tokens}
        self._say(
            f"{len(self._answers)} answers by unified, {len(tokens)} different tokens, after {monotonic() - began_s:.0f} s"
        )
        if self.options.transformers:
            self._judge_answers(plan)
        await self.fleet.start()
        self._say(f"fleet of {', '.join(member.name for member in self.fleet.members)} after {monotonic() - began_s:.0f} s")
        await self._measure()
        await self._arm()
        self._say(f"drill begins after {monotonic() - began_s:.0f} s")

    def _judge_answers(self, plan: FleetPlan) -> None:
        wrong = transformers_disagree(plan, self._catalogue, self._answers, self.options.transformers)
        if wrong is None:
            self._say("transformers: not installed, SKIPPED")
        elif wrong:
            raise RuntimeError(f"transformers disagrees with unified: {wrong}")
        else:
            self._say(f"transformers agrees with unified on up to {self.options.transformers} greedy answers")

    async def _measure(self) -> None:
        """Every entry once, undisturbed: latencies, and what a process holds once it has served."""
        limits_s = [UNDISTURBED_LIMIT_S] * len(self._catalogue)
        traffic = Traffic(self._clients, self._catalogue, limits_s, at_once=self.options.at_once)
        visits = make_visits(len(self._catalogue), self._catalogue, seed=1)
        await traffic.run([_staying(visit, number) for number, visit in enumerate(visits)])
        bad = [outcome for outcome in traffic.outcomes if not outcome.well]
        if bad:
            raise RuntimeError(f"{len(bad)} requests failed undisturbed, e.g. {bad[0]}")
        taken_s = {outcome.visit.entry: outcome.seconds for outcome in traffic.outcomes}
        median_s = sorted(taken_s.values())[len(taken_s) // 2]
        longest_s = [DEADLINE_FACTOR * max(median_s, taken_s[number]) for number in range(len(self._catalogue))]
        self._deadlines_s = [max(LEAST_DEADLINE_S, seconds) for seconds in longest_s]
        self._say(
            f"undisturbed latency: median {median_s:.2f} s, max {max(taken_s.values()):.2f} s; "
            f"deadlines {min(self._deadlines_s):.1f} to {max(self._deadlines_s):.1f} s"
        )
        if left := await at_rest(self.fleet.members):
            raise RuntimeError(f"not at rest before anything was broken: {left}")
        self._baseline = Baseline.of(self.fleet)

    async def _arm(self) -> None:
        """Workers and routers again, this time with the faults they make themselves."""
        worker, router = self._drills()
        if not (worker or router):
            return
        self.fleet.worker_drill, self.fleet.router_drill = worker, router
        armed = [*self.fleet.workers, *(self.fleet.routers if router else ())]
        await asyncio.gather(*(self.fleet.restart(member, drains=True) for member in armed))
        await self.fleet.until_whole(60.0)

    def _drills(self) -> tuple[str, str]:
        """What the environment asks of workers and of routers. A safeguard that is off gets enough to let through."""
        faults, injections = self.options.faults, self.options.injections
        worker = {kind: rate for kind, rate in IN_WORKERS.items() if kind in faults}
        router = {kind: rate for kind, rate in IN_ROUTERS.items() if kind in faults}
        if "checksums-off" in injections:
            worker["scramble"] = SCRAMBLED_SHARE
        if "leases-off" in injections:
            worker["leases_ignored"] = 1.0
        if "attempts-ignored" in injections:
            router["attempts_ignored"] = 1.0
        return drill_text(worker), drill_text(router)

    async def run(self, seed: int, requests: int, rounds: int) -> Verdict:
        """One seed; never raises for what the fleet does."""
        began_s = monotonic()
        verdict, watch = Verdict(seed=seed, tally=Tally(exact=self._exact)), Watch()
        traffic = Traffic(self._clients, self._catalogue, self._deadlines_s, at_once=self.options.at_once)
        kinds = tuple(kind for kind in SCRIPTED if kind in self.options.faults)
        striker = Striker(self.fleet, traffic, kinds, rounds=rounds, requests=requests, seed=seed)
        await watch.begin(self.fleet)
        forwarded_before = self._forwarded_bytes()
        drilled_before, deaths_before, tracebacks_before = self._drilled(), len(self.fleet.ended), self.fleet.tracebacks()
        visits = [
            visit if visit.fate.value in self.options.faults else _staying(visit)
            for visit in make_visits(requests, self._catalogue, seed=seed)
        ]
        beside = [asyncio.create_task(watch.run(self.fleet)), asyncio.create_task(self._tell(traffic, striker))]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(traffic.run(visits, striker.allowed))
                group.create_task(striker.run())
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        verdict.problems = list(striker.problems)
        verdict.leaks = await self._leaks(watch)
        verdict.lives = watch.lives()
        verdict.seconds = monotonic() - began_s
        verdict.strikes = striker.strikes
        verdict.deaths = [f"{name}, exit status {status}: {tail}" for name, status, tail in self.fleet.ended[deaths_before:]]
        verdict.tracebacks = sorted(self.fleet.tracebacks() - tracebacks_before)
        verdict.counted = Counted(
            recoveries=watch.total("jdisagg_recoveries_total"),
            transfer_failures=watch.total("jdisagg_transfer_failures_total"),
            compiles=watch.total("jdisagg_compiles_after_ready_total"),
            retractions=int(sum(watch.total("jdisagg_retractions").values())),
            host_tokens=watch.total("jdisagg_host_kv_tokens"),
            forwarded_bytes=self._forwarded_bytes() - forwarded_before,
            verified_bytes=sum(watch.total("jdisagg_transfer_bytes_total").values()),
        )
        verdict.tally.take(traffic.outcomes, self._catalogue, self._answers)
        verdict.asked, verdict.transfers = self.options.faults, self.fleet.plan.transfers
        verdict.faults = self._faults(striker, traffic.outcomes, self._drilled() - drilled_before)
        return verdict

    async def _leaks(self, watch: Watch) -> list[str]:
        assert self._baseline is not None, "start was not called"
        found = await at_rest(self.fleet.members)
        found += await self._baseline.exceeded(self.fleet)
        await watch.sample(self.fleet)
        return found + watch.growing()

    def _faults(self, striker: Striker, outcomes: list[Outcome], drilled: Counter[str]) -> dict[str, tuple[int, int]]:
        """Fired and live, by kind; what a worker does to a piece is always live."""
        found: dict[str, tuple[int, int]] = {}
        for kind in SCRIPTED:
            mine = [strike.live for strike in striker.strikes if strike.kind == kind]
            found[kind] = (len(mine), sum(mine))
        for kind in dict.fromkeys((*IN_WORKERS, *IN_ROUTERS, *sorted(drilled))):
            found[kind] = (drilled[kind], drilled[kind])
        for kind in BY_CLIENTS:
            mine = [
                not any(choice.tokens for choice in outcome.choices.values())
                for outcome in outcomes
                if outcome.went_away and outcome.visit.fate.value == kind
            ]
            found[kind] = (len(mine), sum(mine))
        return found

    def _forwarded_bytes(self) -> int:
        return sum(member.proxy.bytes_from_worker for member in self.fleet.prefill if member.proxy is not None)

    def _drilled(self) -> Counter[str]:
        return Counter(kind for member in self.fleet.members for kind in _DRILLED.findall(member.logs()))

    async def _tell(self, traffic: Traffic, striker: Striker) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            errors = Counter(outcome.error for outcome in traffic.outcomes if outcome.error and not outcome.went_away)
            self._say(
                f"{len(traffic.outcomes)} ended, {len(traffic.in_flight)} in flight, "
                f"{len(striker.strikes)} strikes, failed {dict(errors)}"
            )

    async def close(self) -> None:
        """End everything."""
        await self._clients.close()
        await self.fleet.close()
        await self._http.aclose()


def _staying(visit: Visit, entry: int | None = None) -> Visit:
    return replace(visit, fate=Fate.STAYS, entry=visit.entry if entry is None else entry)
