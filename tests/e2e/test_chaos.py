"""A fleet that is broken in every way there is, under load: nobody notices, and a harness that would notice.

The whole run, longer and with more seeds: scripts/chaos.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from chaos_kit.fleet import FleetPlan
from chaos_kit.kinds import ALL, IN_WORKERS, SCRIPTED
from chaos_kit.outcome import Fate
from chaos_kit.session import INJECTIONS, Options, Session
from chaos_kit.verdict import Verdict

REQUESTS, NUM_RUNS = 150, 3
START_LIMIT_S, RUN_LIMIT_S = 400.0, 300.0
pytestmark = pytest.mark.timeout(START_LIMIT_S + RUN_LIMIT_S + 60)
UNSUMMED = ("--no-checksums",)
RARE = {"late"}  # one of a hundred fetches of a process, which may die before


@dataclass
class Chaos:
    """A session on a loop that runs only while somebody waits for it."""

    runner: asyncio.Runner
    session: Session
    fired: list[set[str]] = field(default_factory=list)  # kinds of faults, by run

    def run(self, seed: int, *, requests: int, rounds: int = 1) -> Verdict:
        verdict = self.runner.run(asyncio.wait_for(self.session.run(seed, requests, rounds), RUN_LIMIT_S))
        print(f"\n{verdict.text()}")
        self.fired.append({kind for kind, (count, _) in verdict.faults.items() if count})
        return verdict


def chaos(options: Options, directory: Path) -> Iterator[Chaos]:
    with asyncio.Runner() as runner:
        session = runner.run(_made(options, directory))
        try:
            runner.run(asyncio.wait_for(session.start(), START_LIMIT_S))
            yield Chaos(runner, session)
        finally:
            runner.run(session.close())


async def _made(options: Options, directory: Path) -> Session:
    return Session(options, directory, print)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Chaos]:
    options = Options(plan=FleetPlan(model=str(tiny_model), scarce=True), faults=frozenset(ALL))
    yield from chaos(options, tmp_path_factory.mktemp("chaos"))


@pytest.mark.covers("D13", "C10", "X01")
@pytest.mark.parametrize("seed", range(1, NUM_RUNS + 1))
def test_no_fault_costs_a_token_or_leaves_anything_behind(fleet: Chaos, seed: int) -> None:
    verdict = fleet.run(seed, requests=REQUESTS)
    assert verdict.complaints() == []
    assert verdict.tally.requests == REQUESTS
    assert verdict.counted.verified_bytes
    assert fleet.fired[-1] >= {*SCRIPTED, *IN_WORKERS, Fate.CANCELS.value, Fate.LEAVES.value} - RARE
    live = {kind for kind in SCRIPTED if verdict.faults[kind][1]}
    assert len(live) >= 6, verdict.faults  # the others waited for a transfer that did not come
    rungs = "".join(verdict.counted.recoveries)
    assert all(rung in rungs for rung in ("refetch", "other_prefill", "replay"))
    assert sum(verdict.counted.transfer_failures.values()) >= 10
    assert verdict.counted.retractions


def test_every_kind_of_fault_has_fired(fleet: Chaos) -> None:
    """Of what is rare, an output that comes late, or an Abort while its stream still runs, there may be none in one run."""
    if len(fleet.fired) < NUM_RUNS:
        pytest.skip("not all runs were here")
    assert set().union(*fleet.fired) >= {*ALL}


def test_the_harness_sees_what_checksums_leases_and_attempts_prevent(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> None:
    options = Options(
        plan=FleetPlan(model=str(tiny_model), num_prefill=1, prefill_flags=UNSUMMED, decode_flags=UNSUMMED),
        faults=frozenset({"freeze_decode", "sever"}),
        injections=frozenset(INJECTIONS),
        catalogue_size=30,
    )
    for broken in chaos(options, tmp_path_factory.mktemp("teeth")):
        seen: set[str] = set()
        for seed in 4, 5, 6:  # only a stream that had tokens when its worker froze can show what ignored attempts do
            verdict = broken.run(seed, requests=60, rounds=3)
            seen |= {str(flaw) for flaw, count in verdict.tally.flaws.items() if count}
            assert any("published_bytes" in leak for leak in verdict.leaks)
            assert verdict.complaints()
            if seen >= {"wrong", "duplicated"}:
                break
        assert seen >= {"wrong", "duplicated"}
