"""Whose turn comes first: arrival, or priority that waiting time outweighs."""

from __future__ import annotations

import pytest

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Role
from jdisagg.sched.scheduler import Scheduler
from jdisagg.sched.states import Status
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


@pytest.mark.parametrize("policy", ["fcfs", "prefill-first", "priority"])
@pytest.mark.parametrize("role", [Role.UNIFIED, Role.PREFILL])
def test_those_in_the_middle_of_an_answer_go_before_new_ones_in_the_order_in_which_they_came(policy: str, role: Role) -> None:
    engine = FakeEngine(role, scheduling_policy=policy, max_num_seqs=1, delay=0)
    engine.add(request("first", (1,), 3))
    engine.tick()
    engine.add(request("new", (2, 3), 2), request("newer", (2, 3), 2))
    engine.now_s = 100.0
    engine.add(request("begun", (2, 3), 3, generated=(7,)))
    engine.add(request("told-elsewhere", (2, 3), 2), goes_on=True)
    engine.add(request("last", (2, 3), 2))
    started = run_through(engine)
    assert started == ["first", "begun", "told-elsewhere", "new", "newer", "last"]


def run_through(engine: FakeEngine) -> list[str]:
    """Names in order of admission, until nobody is left."""
    for _ in range(60):
        engine.tick()
        for name, sequence in list(engine.scheduler.table.live.items()):
            if sequence.status is Status.PUBLISHING:
                engine.scheduler.cancel(name)
    return [admit.request_id for plan in engine.plans for admit in plan.admit]


@pytest.mark.parametrize("aging_s", [0.0, 10.0])
def test_those_that_go_on_pass_nobody_whom_the_first_of_their_priority_would_not_pass(aging_s: float) -> None:
    engine = FakeEngine(scheduling_policy="priority", priority_aging_s=aging_s, max_num_seqs=1, delay=0)
    engine.add(request("first", (1,), 3))
    engine.tick()
    arrivals = [("much-better", 0.0, 0), ("low", 1.0, 2), ("better", 2.0, 1), ("lower", 3.0, 2), ("lowest", 4.0, 3)]
    for name, now_s, priority in arrivals:
        engine.now_s = now_s
        engine.add(request(name, (2, 3), 2, priority=priority))
    for number in range(2):
        engine.now_s += 1.0
        engine.add(request(f"begun{number}", (2, 3), 3, priority=2, generated=(7,)))
    begun = ["begun0", "begun1"]
    assert run_through(engine) == ["first", "much-better", "better", *begun, "low", "lower", "lowest"]


def test_one_that_goes_on_keeps_its_place_behind_better_priorities_when_nobody_of_its_own_waits() -> None:
    engine = FakeEngine(scheduling_policy="priority", priority_aging_s=10.0, max_num_seqs=1, delay=0)
    engine.add(request("first", (1,), 3))
    engine.tick()
    for name, now_s, priority, generated in (
        ("a", 0.0, 0, ()),
        ("begun", 1.0, 3, (7,)),
        ("b", 30.0, 0, ()),
        ("c", 32.0, 0, ()),
    ):
        engine.now_s = now_s
        engine.add(request(name, (2, 3), 3, priority=priority, generated=generated))
    assert run_through(engine) == ["first", "a", "b", "begun", "c"]


def test_where_they_wait_for_a_peer_those_that_go_on_are_first_too() -> None:
    engine = FakeEngine(Role.DECODE, scheduling_policy="priority", priority_aging_s=1.0, caching=False)
    engine.add(request("new", (2, 3), 3), remote=True, is_open=False)
    engine.now_s = 50.0
    engine.add(request("begun", (2, 3), 4, generated=(7,)), remote=True, is_open=False)
    assert [s.request_id for s in engine.scheduler.table.queues[Status.PREALLOC]] == ["begun", "new"]


def test_a_prefill_worker_keeps_no_room_for_outputs() -> None:
    engine = FakeEngine(Role.PREFILL, num_pages=5, reserved_decode_tokens=20, caching=False)
    engine.add(request("a", (1,) * 8, 20), request("b", (2,) * 8, 20))  # 2 of 4 pages each
    assert [admit.request_id for admit in engine.tick().admit] == ["a", "b"]
    for name in ("a", "b"):
        engine.scheduler.cancel(name)
    engine.run()


def test_a_scheduler_holds_requests_to_its_read_budget_and_keeps_nothing_on_the_host_unasked() -> None:
    sizes = {"max_model_len": 64, "page_size": 4, "num_pages": 40, "eos_token_ids": ()}
    scheduler = Scheduler(SchedulerConfig(max_num_kv_read_tokens=20), role=Role.UNIFIED, **sizes)
    scheduler.add(request("a", (1,) * 18, 3), 0.0)
    with pytest.raises(InvalidRequest, match="one step of this worker reads 20 tokens"):
        scheduler.add(request("b", (1,) * 18, 4), 0.0)
    assert scheduler.snapshot()["host_tokens"] == {"total": 0, "used": 0}
