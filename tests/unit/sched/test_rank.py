"""Whose turn comes first: arrival, or priority that waiting time outweighs."""

from __future__ import annotations

import pytest

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Role
from jdisagg.sched.scheduler import Scheduler
from tests.unit.sched.engine_fake import FakeEngine, expected, request


def order_of(engine: FakeEngine, arrivals: list[tuple[str, float, int]]) -> list[str]:
    """Names in order of admission: (name, arrival second, priority) wait for one slot that is taken."""
    engine.add(request("first", (1,), 3))
    engine.tick()
    for name, now_s, priority in arrivals:
        engine.now_s = now_s
        engine.add(request(name, (2, 3), 2, priority=priority))
    engine.run()
    assert all(engine.seen[name].tokens == expected((2, 3), 2) for name, _, _ in arrivals)
    return [admit.request_id for plan in engine.plans for admit in plan.admit][1:]


@pytest.mark.parametrize("aging_s", [0.25, 1.0, 10.0])
@pytest.mark.parametrize(("share", "order"), [(0.99, ["high", "low"]), (1.01, ["low", "high"])])
def test_two_levels_are_outweighed_by_twice_the_ageing_time(aging_s: float, share: float, order: list[str]) -> None:
    engine = FakeEngine(scheduling_policy="priority", priority_aging_s=aging_s, max_num_seqs=1, delay=0)
    assert order_of(engine, [("low", 0.0, 3), ("high", 2 * aging_s * share, 1)]) == order


def test_without_ageing_waiting_changes_nothing() -> None:
    engine = FakeEngine(scheduling_policy="priority", priority_aging_s=0.0, max_num_seqs=1, delay=0)
    arrivals = [("c", 0.0, 2), ("d", 1.0, 2), ("b", 500.0, 1), ("a", 900.0, 0)]
    assert order_of(engine, arrivals) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("policy", ["fcfs", "prefill-first"])
def test_other_policies_know_arrival_alone(policy: str) -> None:
    engine = FakeEngine(scheduling_policy=policy, max_num_seqs=1, delay=0)
    assert order_of(engine, [("a", 0.0, 2), ("b", 1.0, 0), ("c", 2.0, 1)]) == ["a", "b", "c"]


def test_a_prefill_worker_keeps_no_room_for_outputs() -> None:
    engine = FakeEngine(Role.PREFILL, num_pages=5, reserved_decode_tokens=20, caching=False)
    engine.add(request("a", (1,) * 8, 20), request("b", (2,) * 8, 20))  # 2 of 4 pages each
    assert [admit.request_id for admit in engine.tick().admit] == ["a", "b"]
    for name in ("a", "b"):
        engine.scheduler.release(name)
    engine.run()


def test_a_scheduler_holds_requests_to_its_read_budget_and_keeps_nothing_on_the_host_unasked() -> None:
    sizes = {"max_model_len": 64, "page_size": 4, "num_pages": 40, "eos_token_ids": ()}
    scheduler = Scheduler(SchedulerConfig(max_num_kv_read_tokens=20), role=Role.UNIFIED, **sizes)
    scheduler.add(request("a", (1,) * 18, 3), 0.0)
    with pytest.raises(InvalidRequest, match="one step of this worker reads 20 tokens"):
        scheduler.add(request("b", (1,) * 18, 4), 0.0)
    assert scheduler.snapshot()["host_tokens"] == {"total": 0, "used": 0}
