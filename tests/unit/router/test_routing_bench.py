"""The simulated fleet of scripts/bench_routing.py: its figures are of the code alone, and near the ideal ones."""

from __future__ import annotations

from random import Random

from route_bench.loads import Start, conversations, questions
from route_bench.workers import Job, Simulation

from jdisagg.core.requests import Role


def simulated(start: Start, per_s: float, num_each: int = 3) -> Simulation:
    simulation = Simulation(num_each, num_each, 60_000)
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
