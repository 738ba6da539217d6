"""What each policy and bound of the scheduler promises, over arbitrary loads: budgets, margin, bypass, ageing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.requests import Role
from jdisagg.sched.plan import Plan
from tests.unit.sched.engine_fake import FakeEngine, expected, request
from tests.unit.sched.loads import LOADS, Arrival, Watched

POLICIES = st.sampled_from(["fcfs", "priority", "prefill-first"])
PAGE = 4


class ReadsCounted(Watched):
    """Adds up what each step reads."""

    most_reads = 0

    def saw(self, plan: Plan, was: dict[str, Any]) -> None:
        reads = sum(c.start + len(c.token_ids) for c in plan.prefill) + sum(self.device.slots[s].length for s in plan.decode)
        self.most_reads = max(self.most_reads, reads)
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert reads <= self.config.max_num_kv_read_tokens, f"step {plan.step_id} reads {reads} tokens"


@pytest.mark.covers("H01")
@given(
    load=LOADS,
    num_pages=st.integers(11, 24),
    max_num_kv_read_tokens=st.integers(36, 60),
    max_num_batched_tokens=st.integers(4, 12),
    scheduling_policy=POLICIES,
    num_scheduler_steps=st.sampled_from([1, 4]),
    host_tokens=st.sampled_from([0, 200]),
)
def test_no_step_computes_or_reads_more_than_its_budgets(load: list[Arrival], **options: Any) -> None:
    engine = ReadsCounted(max_model_len=36, **options)
    engine.play(load)
    assert engine.most_reads > 0


@pytest.mark.covers("H01")
def test_kv_that_comes_back_from_the_host_waits_for_a_step_that_can_read_it() -> None:
    engine = ReadsCounted(num_pages=12, max_model_len=36, max_num_batched_tokens=8, max_num_kv_read_tokens=36, host_tokens=200)
    engine.play([Arrival(0, 1, 10, 0), Arrival(3, 18, 5, 0), Arrival(0, 1, 3, 0), Arrival(0, 4, 2, 0)])
    assert engine.scheduler.stats.restored_tokens > 0


class MarginWatched(Watched):
    """Checks what starts while less than the safety margin is free."""

    def saw(self, plan: Plan, was: dict[str, Any]) -> None:
        if was["pages"]["free"] >= self.config.safety_margin * was["pages"]["total"]:
            return
        if self.scheduler.stats.preemptions > was["stats"]["preemptions"]:
            return  # what was freed may have ended the shortage
        assert plan.admit == (), "something new started below the margin while others held memory"
        assert len(plan.prefill) <= 1
        slots = [chunk.slot for chunk in plan.prefill]
        going_on = [s["slot"] for s in was["sequences"] if s["status"] == "running" and (_is_behind(s) or s["slot"] in slots)]
        assert slots == going_on[: len(slots)], "not the first prompt went on"


def _is_behind(sequence: dict[str, Any]) -> bool:
    """More than the token a decode step feeds is missing."""
    return (
        sequence["scheduled_tokens"]
        < sum(sequence[key] for key in ("prompt_tokens", "generated_tokens", "in_flight_tokens")) - 1
    )


@pytest.mark.covers("H03")
@given(load=LOADS, margin=st.sampled_from([0.2, 0.5, 0.9]), num_pages=st.integers(10, 24), policy=POLICIES)
def test_below_the_margin_only_the_first_prompt_goes_on_and_nobody_starves(
    load: list[Arrival], margin: float, num_pages: int, policy: str
) -> None:
    engine = MarginWatched(num_pages=num_pages, max_model_len=36, safety_margin=margin, scheduling_policy=policy)
    engine.play(load)
    assert {f"r{i}" for i in range(len(load))} >= engine.seen.keys() > set()


@pytest.mark.covers("H03")
def test_below_the_margin_the_second_prompt_pauses() -> None:
    engine = MarginWatched(num_pages=13, safety_margin=0.5, max_num_batched_tokens=8, long_prefill_token_threshold=3)
    engine.add(request("a", tuple(range(1, 17)), 2), request("b", tuple(range(2, 18)), 2))
    engine.run()
    names = [[chunk.request_id for chunk in plan.prefill] for plan in engine.plans]
    assert names[:2] == [["a", "b"], ["a"]]
    assert engine.seen["b"].tokens == expected(tuple(range(2, 18)), 2)


@pytest.mark.covers("H03")
def test_below_the_margin_an_idle_worker_starts_one_prompt() -> None:
    engine = FakeEngine(Role.DECODE, num_pages=11, safety_margin=0.9)
    shared = tuple(range(1, 9))
    engine.add(request("before", shared, 2))
    engine.run()
    engine.add(request("pins", (*shared, 5), 2), remote=True, is_open=False)  # 2 of 10 pages, and never ready
    engine.add(request("a", (9,) * 6, 3), request("b", (8,) * 6, 3))
    assert [c.request_id for c in engine.tick().prefill] == ["a"]
    while "b" not in engine.seen:
        engine.tick()
    engine.scheduler.cancel("pins")
    engine.run()
    assert [engine.seen[name].tokens for name in "ab"] == [expected((9,) * 6, 3), expected((8,) * 6, 3)]


@pytest.mark.covers("H04")
def test_prefill_first_goes_on_with_prompts_then_decodes_then_starts_new_ones() -> None:
    engine = FakeEngine(max_num_batched_tokens=8, scheduling_policy="prefill-first", caching=False, delay=0)
    a, b, c = (1, 2), tuple(range(1, 20)), (4, 5, 6)
    engine.add(request("a", a, 6), request("b", b, 3), request("c", c, 2))
    engine.run()

    def rows(plan: Plan) -> list[str]:
        slots = {s.slot: s.request_id for p in engine.plans[: engine.plans.index(plan) + 1] for s in p.admit}
        return [f"{ch.request_id}+{len(ch.token_ids)}" for ch in plan.prefill] + [slots[s] for s in plan.decode]

    assert [rows(plan) for plan in engine.plans[:4]] == [
        ["a+2", "b+6"],
        ["b+8"],  # a has to wait, and c does not start
        ["b+5", "c+2", "a"],  # the split prompt ends, a decodes, and what is left starts c
        ["c+1", "a", "b"],
    ]
    assert engine.config.safety_margin == 0
    assert [engine.seen[n].tokens for n in "abc"] == [expected(a, 6), expected(b, 3), expected(c, 2)]


class WholePrompts(Watched):
    """Without chunks: everything missing in one step, and who waits is not passed."""

    def saw(self, plan: Plan, was: dict[str, Any]) -> None:
        assert all(chunk.samples for chunk in plan.prefill), "a part of a prompt"
        waiting = [s["request_id"] for s in was["sequences"] if s["status"] == "waiting"]
        started = [a.request_id for a in plan.admit]
        assert started == waiting[: len(started)], "a later one passed"
        assert [chunk.request_id for chunk in plan.prefill] == started, "one started without being computed"


@pytest.mark.covers("V29")
@given(load=LOADS, policy=st.sampled_from(["fcfs", "prefill-first"]), caching=st.booleans(), reads=st.sampled_from([0, 50]))
def test_without_chunks_a_prompt_waits_until_a_step_holds_it_whole(
    load: list[Arrival], policy: str, caching: bool, reads: int
) -> None:
    engine = WholePrompts(
        num_pages=80,
        max_model_len=36,
        max_num_batched_tokens=36,
        max_num_kv_read_tokens=reads,
        enable_chunked_prefill=False,
        scheduling_policy=policy,
        caching=caching,
    )
    engine.play(load)
    assert {f"r{i}" for i in range(len(load))} >= engine.seen.keys() > set()


class BypassWatched(Watched):
    """Counts who was passed by later ones, and checks that nobody waits for memory that is there."""

    def __init__(self, **options: Any) -> None:
        super().__init__(caching=False, **options)
        self.passed: dict[str, int] = {}

    def saw(self, plan: Plan, was: dict[str, Any]) -> None:
        started = [int(a.request_id[1:]) for a in plan.admit]
        gone = {a.request_id for a in plan.admit}
        waiting = [s for s in was["sequences"] if s["status"] == "waiting" and s["request_id"] not in gone]
        for sequence in waiting:
            later = sum(number > int(sequence["request_id"][1:]) for number in started)
            self.passed[sequence["request_id"]] = self.passed.get(sequence["request_id"], 0) + later
        if not waiting or self.scheduler.stats.preemptions > was["stats"]["preemptions"]:
            return
        if len(self.device.slots) == self.config.max_num_seqs or plan.num_tokens == self.config.max_num_batched_tokens:
            return
        head = waiting[0]
        sequence = self.scheduler.table.live[head["request_id"]]
        more = max(1, min(3, sequence.max_len - sequence.num_known)) if sequence.wait.was_preempted else 1
        needed = -(-(sequence.num_known + more - 1) // PAGE)
        spare = self.scheduler.table.pages.num_unpromised
        assert needed > spare, f"{head['request_id']} fits and did not start"


@pytest.mark.covers("X16")
@given(load=LOADS, max_bypass=st.integers(0, 3), num_pages=st.integers(10, 16), host_tokens=st.sampled_from([0, 60]))
def test_who_lacks_memory_is_passed_at_most_max_bypass_times_and_starts_when_it_fits(
    load: list[Arrival], max_bypass: int, num_pages: int, host_tokens: int
) -> None:
    engine = BypassWatched(
        num_pages=num_pages, max_model_len=36, max_num_seqs=6, max_bypass=max_bypass, host_tokens=host_tokens
    )
    engine.play(load)
    assert max(engine.passed.values(), default=0) <= max_bypass


@pytest.mark.covers("X16")
def test_a_small_request_passes_a_head_that_lacks_memory() -> None:
    engine = BypassWatched(num_pages=11, max_num_seqs=6, max_bypass=2)
    engine.add(request("r0", (1,) * 24, 8), request("r1", (2,) * 24, 2))
    engine.add(*(request(f"r{i}", (i,) * 3, 2) for i in range(2, 7)))
    engine.run()
    admitted = [a.request_id for plan in engine.plans for a in plan.admit]
    assert admitted[:4] == ["r0", "r2", "r3", "r1"]
    assert engine.passed["r1"] == 2


@pytest.mark.covers("V09")
def test_a_prompt_that_loses_its_pages_gives_its_part_of_the_step_back() -> None:
    engine = FakeEngine(
        num_pages=9, max_num_batched_tokens=4, long_prefill_token_threshold=2, max_num_kv_read_tokens=20,
        scheduling_policy="prefill-first", caching=False, delay=0,
    )  # fmt: skip
    engine.add(*(request(name, (value,), 9) for value, name in enumerate("acd", start=5)))
    engine.add(request("b", tuple(range(1, 15)), 2))  # last in order, its prompt takes 7 steps beside two decodes
    while (plan := engine.tick()) and not engine.scheduler.stats.preemptions:
        assert len(plan.prefill) != 1 or len(plan.decode) == 2  # 2 + 1 + 1 tokens; nothing is left for d
    # The second one to decode found no page: the chunk that was planned for b goes, and with it its tokens and its reads.
    slots = {a.request_id: a.slot for plan in engine.plans for a in plan.admit}
    assert plan.prefill == ()
    assert set(plan.decode) == {slots[name] for name in "acd"}
    assert slots["b"] not in {append.slot for append in plan.pages}
    engine.run()
    assert engine.seen["b"].tokens == expected(tuple(range(1, 15)), 2)
    for value, name in enumerate("acd", start=5):
        assert engine.seen[name].tokens == expected((value,), 9)


@given(
    arrivals=st.lists(st.tuples(st.floats(0, 8), st.integers(0, 3)), min_size=2, max_size=12),
    aging_s=st.sampled_from([0.5, 2.0]),
)
def test_a_request_is_passed_only_by_those_that_come_within_its_age(arrivals: list[tuple[float, int]], aging_s: float) -> None:
    engine = FakeEngine(max_num_seqs=1, scheduling_policy="priority", priority_aging_s=aging_s)
    came: dict[str, tuple[float, int]] = {}
    for number, (after_s, priority) in enumerate(arrivals):
        engine.now_s += after_s
        engine.tick()
        came[f"r{number}"] = engine.now_s, priority
        engine.add(request(f"r{number}", (number + 1, 2, 3), 3, priority=priority))
    engine.run()
    started = [a.request_id for plan in engine.plans for a in plan.admit]
    assert sorted(started) == sorted(came)
    for place, first in enumerate(started):
        for other in started[place + 1 :]:
            if came[first][0] > came[other][0]:
                difference = came[other][1] - came[first][1]
                assert came[first][0] - came[other][0] <= difference * aging_s + 1e-9


def test_without_ageing_a_better_priority_always_goes_first() -> None:
    engine = FakeEngine(max_num_seqs=1, scheduling_policy="priority", priority_aging_s=0.0)
    engine.add(request("running", (1, 2), 8), request("low", (3, 4), 2, priority=1))
    engine.tick()
    for number in range(3):
        engine.now_s += 1e6
        engine.add(request(f"high{number}", (5, number), 2))
    engine.run()
    assert [a.request_id for plan in engine.plans for a in plan.admit][-1] == "low"


@pytest.mark.covers("V17")
@given(answers=st.lists(st.booleans(), max_size=20), num_pages=st.integers(8, 12))
def test_a_peer_that_says_ask_later_any_number_of_times_holds_up_nobody(answers: list[bool], num_pages: int) -> None:
    engine = FakeEngine(Role.DECODE, num_pages=num_pages)
    shared = tuple(range(1, 13))
    engine.add(request("before", shared, 2))  # leaves pages that the remote one pins
    engine.run()
    late = request("late", (*shared, 5), 6)
    engine.add(late, remote=True, is_open=False)
    for number, is_ready in enumerate(answers):
        engine.scheduler.peer_ready("late", is_ready)
        engine.scheduler.peer_ready("late", False)
        engine.add(request(f"o{number}", (number + 1,) * 7, 4))
        engine.tick()
    for _ in range(300):
        if len(engine.scheduler.snapshot()["sequences"]) == 1 and not engine.in_flight:
            break
        engine.tick()
    for number in range(len(answers)):
        assert engine.seen[f"o{number}"].tokens == expected((number + 1,) * 7, 4)
    assert engine.scheduler.take_reserved() == []
    engine.scheduler.peer_ready("late")
    engine.tick()
    (reserved,) = engine.scheduler.take_reserved()
    assert reserved.request_id == "late"
    engine.scheduler.compute_locally("late")
    engine.run()
    assert engine.seen["late"].tokens == expected(late.prompt_token_ids, 6)
