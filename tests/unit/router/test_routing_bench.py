"""The simulated fleet of scripts/bench_routing.py: its figures are of the code alone, and near the ideal ones."""

from __future__ import annotations

from random import Random

import pytest
from route_bench.loads import Start, bursts, conversations, questions
from route_bench.workers import Job, Simulation

from jdisagg.core.requests import Role
from jdisagg.router import fleet
from jdisagg.router.prefixes import NOWHERE, Prefixes


def simulated(start: Start, per_s: float, num_each: int = 3, cache_tokens: int = 60_000, slow: float = 1.0) -> Simulation:
    simulation = Simulation(num_each, num_each, cache_tokens, slow=slow)
    start(simulation, Random(1), per_s)
    simulation.run()
    for worker in simulation.workers.values():
        assert not worker.queue
        assert (worker.entry.pending, worker.entry.pending_tokens, worker.entry.pending_cached) == (0, 0, 0)
    return simulation


def share(jobs: list[Job]) -> float:
    """Of what one cache without end would have."""
    return sum(job.cached for job in jobs) / sum(job.ideal for job in jobs)


def test_texts_behind_one_system_prompt_are_found_and_no_worker_has_them_all() -> None:
    start = questions(300, system=200, texts=20, lengths=(2000, 8000))
    simulation = simulated(start, 60.0)
    assert share(simulation.done) > 0.94
    busy = [worker.busy_s for worker in simulation.workers.values() if worker.entry.member.role is Role.PREFILL]
    assert max(busy) < 1.3 * sum(busy) / len(busy)
    again = simulated(start, 60.0)
    assert [job.ttft_s for job in again.done] == [job.ttft_s for job in simulation.done]


def test_branches_find_what_they_have_in_common_and_what_is_their_own() -> None:
    start = conversations(10, history=(2000, 3000), branches=4, turns=3, pause_s=0.3)
    assert share(simulated(start, 30.0).done) > 0.97


def test_pools_that_hold_two_of_many_documents_cost_no_waiting_for_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    start = questions(300, system=200, texts=150, lengths=(2000, 8000))
    known = simulated(start, 5.5, cache_tokens=11_000)
    monkeypatch.setattr(Prefixes, "find", lambda self, beginnings: NOWHERE)
    unknown = simulated(start, 5.5, cache_tokens=11_000)
    assert late_s(known) <= late_s(unknown)
    assert share(known.done) > 1.2 * share(unknown.done)


def test_one_new_text_that_many_ask_about_at_once_is_computed_by_few(monkeypatch: pytest.MonkeyPatch) -> None:
    start = bursts(30, size=12, lengths=(2000, 8000), within_s=0.1)
    few = simulated(start, 30.0)
    assert share(few.done) > 0.9
    monkeypatch.setattr(fleet, "AGAIN_SHARE", 0.0)
    assert late_s(few) < 0.8 * late_s(simulated(start, 30.0))


@pytest.mark.parametrize("per_s", [3.0, 8.0, 11.0])  # where three serve 11 in a second, of which one is ten times slower
def test_few_wait_for_a_slow_prefill_worker(per_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    start = questions(400, system=0, texts=0, lengths=(500, 4000))
    known = simulated(start, per_s, slow=10.0)
    monkeypatch.setattr(fleet, "taken_for", lambda told: [1.0] * len(told))
    unknown = simulated(start, per_s, slow=10.0)
    assert late_s(known) < 0.6 * late_s(unknown)


def late_s(simulation: Simulation) -> float:
    """The time to first token of the slowest twentieth begins there."""
    return sorted(job.ttft_s for job in simulation.done)[-len(simulation.done) // 20]
