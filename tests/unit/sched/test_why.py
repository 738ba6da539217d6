"""Why a request waited, from the real scheduler's state, as `jdisagg.replay --why` and `GET /debug/state` say it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jdisagg.core.requests import FinishReason, Role
from jdisagg.sched.explain import Cause, Wait
from jdisagg.sched.states import Status
from tests.unit.sched.engine_fake import FakeEngine, request
from tests.unit.sched.peer_fake import PROMPT, arrive
from tests.unit.sched.story import TICK_S, Tell, finish


def test_pages_short_are_counted_as_the_gate_counts_and_who_freed_them_is_named(tell: Tell) -> None:
    def drive(engine: FakeEngine) -> None:
        engine.add(request("old", tuple(range(1, 17)), 8))
        engine.tick()
        engine.now_s += TICK_S
        engine.add(request("new", tuple(range(2, 30)), 4))
        finish(engine)

    story = tell(drive, "new", num_pages=12, caching=False, reserved_decode_tokens=8)
    # 11 pages; old: 16 + 7 tokens = 6 pages promised, 4 taken at once, the 5th with its first decode; new: 31 tokens = 8 pages
    assert story[0] == "request new: 28 prompt tokens, at most 4 new; added at 0.004 s"
    assert story[1] == (
        "+0 ms      waited 32 ms: 3 pages short (needs 8, 6 free, 1 promised to admitted requests); "
        "at last 3 pages short (needs 8, 5 free), freed when request old ended"
    )
    assert story[2] == "+32 ms     prefilled in 2 chunks: steps 8-9, 28 tokens"
    assert story[3] == "+40 ms     decoded in 3 steps: steps 10-12, 3 tokens"
    assert story[4] == "+52 ms     finished: length, 4 tokens; queue 32 ms + prefill 8.0 ms + decode 12 ms = 52 ms"


def test_slots_and_the_spent_token_budget_are_named(tell: Tell) -> None:
    def two(engine: FakeEngine) -> None:
        engine.add(request("a", (1, 2), 5), request("b", (3, 4), 5))
        finish(engine)

    assert tell(two, "b", max_num_seqs=1)[1] == "+0 ms      waited 24 ms: no slot, all 1 taken, freed when request a ended"

    def long(engine: FakeEngine) -> None:
        engine.add(request("a", tuple(range(1, 41)), 5), request("b", tuple(range(2, 22)), 5))
        finish(engine)

    story = tell(long, "b")
    assert story[1] == "+0 ms      waited 8.0 ms: token budget of 16 spent by 16 prompt tokens of request a"
    assert story[2] == "+8.0 ms    prefilled in 2 chunks: steps 2-3, 20 tokens"


def test_a_request_behind_one_that_lacks_pages_says_so(tell: Tell) -> None:
    def drive(engine: FakeEngine) -> None:
        engine.add(request("old", tuple(range(1, 17)), 8))
        engine.tick()
        engine.now_s += TICK_S
        engine.add(request("big", tuple(range(2, 30)), 4), request("small", (9,), 2))
        finish(engine)

    story = tell(drive, "small", num_pages=12, caching=False, reserved_decode_tokens=8, max_bypass=0)
    assert story[1].startswith("+0 ms      waited 32 ms: behind request big, 3 pages short (needs 8, 6 free")


def test_a_request_is_behind_nobody_whose_turn_comes_after_its_own() -> None:
    """A choice of theirs lacks pages, too, and is looked at first in each step."""
    engine = FakeEngine(
        num_pages=8, caching=False, reserved_decode_tokens=12, max_bypass=0, scheduling_policy="priority", priority_aging_s=0.0
    )
    engine.add(*(request(f"later/{i}", (1,) * 9, 12, fork_group="later", priority=1) for i in range(2)))
    engine.tick()
    engine.add(request("big", (2,) * 9, 12), request("small", (3, 3), 1))
    engine.tick()
    assert engine.scheduler.table.live["later/1"].status is Status.FORKING
    wait = engine.scheduler.why_not("small")
    assert wait is not None
    assert (wait.cause, wait.about) == (Cause.ORDER, "big")
    engine.run()


def test_who_may_not_pass_one_that_lacks_reads_is_behind_it() -> None:
    """What was left of them is kept for `ready`, whose KV is in place."""
    engine = FakeEngine(Role.DECODE, max_num_kv_read_tokens=40, max_bypass=0, max_model_len=40)
    engine.add(request("runs", (1,) * 16, 12))
    engine.add(request("ready", (2,) * 24, 4), remote=True)
    engine.tick()
    engine.add(request("waits", (3, 3), 2))
    engine.add(request("fetches", (4, 4), 2), remote=True)
    arrive(engine, engine.scheduler.take_reserved()[0], (2,) * 24)
    engine.step()
    told = {name: engine.scheduler.why_not(name) for name in ("waits", "fetches")}
    spent = "read budget of 40 spent, 0 tokens left"
    assert told == {"waits": Wait(Cause.READS, spent), "fetches": Wait(Cause.ORDER, f"behind request waits: {spent}", "waits")}
    engine.drop("fetches")
    engine.run()


def test_who_took_the_pages_of_a_preempted_request_is_named(tell: Tell) -> None:
    def drive(engine: FakeEngine) -> None:
        engine.add(*(request(f"r{i}", (i + 1,) * 4, 12) for i in range(3)))
        finish(engine)

    story = tell(drive, "r2", num_pages=8)
    assert "+20 ms     preempted in step 5 for request r1 (older), 2 pages" in story
    assert "+24 ms     waited 12 ms: 2 pages short (needs 3, 1 free)" in story
    assert story[-1].endswith("queue 32 ms + prefill 8.0 ms + decode 44 ms = 84 ms")
    own = tell(drive, "r1", num_pages=8)
    assert "+36 ms     preempted in step 9 for its own next token: no page was free, 3 pages" in own


@pytest.mark.parametrize("seed", range(16))
def test_nothing_is_passed_over_without_a_reason_that_the_tables_confirm(seed: int) -> None:
    """Random loads on a small pool: every request that gets nothing of a step has a cause."""
    draw = random.Random(seed)
    rules: dict[str, Any] = {
        "scheduling_policy": draw.choice(["fcfs", "priority", "prefill-first"]),
        "safety_margin": draw.choice([0.0, 0.0, 0.3]),
        "max_num_kv_read_tokens": draw.choice([0, 0, 40]),
        "num_scheduler_steps": draw.choice([1, 3]),
        "host_tokens": draw.choice([0, 100]),
        "max_bypass": draw.choice([0, 1, 16]),
    }
    if draw.random() < 0.3:
        rules |= {"enable_chunked_prefill": False, "max_model_len": 40, "max_num_batched_tokens": 40}
    engine = FakeEngine(num_pages=draw.choice([12, 20]), max_num_seqs=draw.choice([2, 4]), reserved_decode_tokens=6, **rules)
    scheduler, causes, added = engine.scheduler, set[Cause](), 0
    for _ in range(250):
        if draw.random() < 0.3 and added < 60:
            prompt = tuple(draw.randrange(1, 4) for _ in range(draw.randrange(1, 25)))
            tokens, group = draw.randrange(1, 12), draw.choice(["", f"g{added}"])
            for _ in range(3 if group else 1):
                engine.add(request(f"r{added}", prompt, tokens, fork_group=group, priority=draw.randrange(3)))
                added += 1
        plan = engine.step()
        before = scheduler.snapshot()
        for sequence in list(scheduler.table.live.values()):
            wait = scheduler.why_not(sequence.request_id)
            worked = sequence.slot in plan.decode or any(c.request_id == sequence.request_id for c in plan.prefill)
            if worked and sequence.status is Status.RUNNING:
                assert wait is None
            elif sequence.status is Status.WAITING:
                assert wait is not None
            if wait is not None:
                assert wait.cause is not Cause.UNEXPLAINED, (wait, scheduler.snapshot())
                assert (wait.cause is Cause.SLOT) <= (scheduler.table.slots.num_free == 0)
                spent = plan.num_tokens == engine.config.max_num_batched_tokens or not engine.config.enable_chunked_prefill
                assert (wait.cause is Cause.BUDGET) <= spent
                causes.add(wait.cause)
        assert scheduler.snapshot() == before, "asking changed something"
        if len(engine.in_flight) > 1 or plan.is_empty:
            engine.commit_one()
    assert len(causes) >= 2
    engine.run()


def test_live_state_says_what_each_request_waits_for() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.add(request("a", (1, 2), 5), request("b", (3, 4), 5))
    engine.tick()
    engine.add(request("c", (5,), 1))  # no plan has seen it
    waits = {s["request_id"]: s["waits_for"] for s in engine.scheduler.snapshot()["sequences"]}
    assert waits["a"] is None
    assert waits["b"] == "no slot, all 1 taken"
    engine.run()
    assert engine.seen["a"].last.finish is FinishReason.LENGTH


def test_a_choice_that_lacks_pages_says_so_in_the_step_in_which_the_prompts_kv_has_come_from_a_peer() -> None:
    engine = FakeEngine(Role.DECODE, num_pages=5, caching=False, reserved_decode_tokens=6)
    engine.add(*(request(f"a/{i}", PROMPT, 6, fork_group="a") for i in range(2)), remote=True)
    engine.tick()
    (reserved,) = engine.scheduler.take_reserved()
    arrive(engine, reserved, PROMPT)
    engine.step()
    assert engine.scheduler.table.live["a/1"].status is Status.FORKING
    wait = engine.scheduler.why_not("a/1")
    assert wait is not None
    assert wait.cause is Cause.MEMORY, wait
    engine.drop("a/1")
    engine.run()
