"""What a step asks of the device for running sequences: rows, pages and chunks, within budgets that are used up exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.requests import Role, SamplingParams
from jdisagg.sched.plan import Admit, PageAppend, PrefillChunk, Sampled, StepResult
from jdisagg.sched.scheduler import Scheduler
from tests.unit.sched.engine_fake import EOS, FakeEngine, expected, request

PROMPT = tuple(range(1, 11))
MAX_STEPS = 60  # of a handful of short requests


def test_an_admission_tells_the_device_all_it_needs() -> None:
    engine = FakeEngine()
    asked = replace(request("a/3", PROMPT, 9, ignore_eos=False, generated=(5, 6), temperature=0.5, top_k=4), choice=3)
    engine.add(asked)
    plan = engine.tick()
    assert plan.prefill == (
        PrefillChunk(slot=0, request_id="a/3", start=0, token_ids=(*PROMPT, 5, 6), samples=True, targets=None, num_top=0),
    )
    assert plan.admit == (
        Admit(
            slot=0,
            request_id="a/3",
            choice=3,
            sampling=SamplingParams(max_tokens=9, temperature=0.5, top_k=4),
            stop_ids=(EOS,),
            page_table=((1, 2, 3),),
            prompt_token_ids=PROMPT,
            generated_token_ids=(5, 6),
            decodes=False,
        ),
    )


def test_pages_of_several_steps_are_appended_in_order() -> None:
    engine = FakeEngine(num_scheduler_steps=10, delay=0)
    engine.add(request("a", (1, 2, 3), 11))
    engine.tick()
    plan = engine.tick()
    assert (plan.num_steps, plan.decode) == (10, (0,))
    assert plan.pages == tuple(PageAppend(slot=0, index=i, page=i + 1) for i in (1, 2, 3))  # tokens 3 to 12
    engine.run()
    assert engine.seen["a"].tokens == expected((1, 2, 3), 11)


@pytest.mark.parametrize(("num_lookahead", "num_pages"), [(0, 1), (1, 2), (4, 2), (5, 3)])
def test_lookahead_is_reserved_beside_the_next_token(num_lookahead: int, num_pages: int) -> None:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=20),
        role=Role.UNIFIED,
        **{"max_model_len": 64, "page_size": 4, "num_pages": 20, "eos_token_ids": (), "num_lookahead": num_lookahead},
    )
    scheduler.add(request("a", (1, 2, 3), 9), 0.0)
    scheduler.schedule(0.0)
    scheduler.commit(StepResult(step_id=0, sampled=(Sampled(slot=0, token_ids=(4,)),)))
    scheduler.schedule(0.0)
    assert len(scheduler.page_table("a")[0]) == num_pages


def test_no_page_is_taken_beyond_the_context() -> None:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=20),
        role=Role.UNIFIED,
        **{"max_model_len": 8, "page_size": 4, "num_pages": 20, "eos_token_ids": (), "num_lookahead": 7},
    )
    scheduler.add(request("a", (1, 2, 3), 5), 0.0)
    scheduler.schedule(0.0)
    scheduler.schedule(0.0)
    assert len(scheduler.page_table("a")[0]) == 2


@pytest.mark.parametrize(("wanted", "tops"), [(0, [0, 0, 0]), (2, [2, 2, 0])])
def test_alternatives_are_asked_for_where_a_next_token_is_scored(wanted: int, tops: list[int]) -> None:
    engine = FakeEngine(max_num_batched_tokens=5, max_num_seqs=1)
    engine.add(request("a", (*PROMPT, 11), 2, prompt_logprobs=wanted))  # chunks of 5, 5 and 1
    engine.run()
    asked = [c for p in engine.plans for c in p.prefill]
    assert [c.targets for c in asked] == [(2, 3, 4, 5, 6), (7, 8, 9, 10, 11), None]
    assert [c.num_top for c in asked] == tops


@pytest.mark.parametrize(
    ("policy", "steps"),
    [("fcfs", [(3, 2), (3, 2), (3, 2), (3, 2), (3, 2), (3, 1)]), ("prefill-first", [(3, 2), (0, 5), (1, 4), (4, 0), (4, 0)])],
)
def test_a_running_prompt_yields_to_decodes_or_goes_before_them(policy: str, steps: list[tuple[int, int]]) -> None:
    engine = FakeEngine(scheduling_policy=policy, max_num_batched_tokens=5, delay=0)
    engine.add(*(request(f"r{i}", (i + 1,), 20) for i in range(3)))
    engine.tick()
    engine.add(request("long", tuple(range(10, 21)), 9))
    plans = [engine.tick() for _ in steps]
    assert [(len(p.decode), sum(len(c.token_ids) for c in p.prefill)) for p in plans] == steps
    engine.run()
    assert engine.seen["long"].tokens == expected(tuple(range(10, 21)), 9)


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    budget=st.integers(4, 12),
    threshold=st.integers(0, 5),
)
def test_a_step_is_as_full_as_budget_and_threshold_allow(lengths: list[int], budget: int, threshold: int) -> None:
    engine = FakeEngine(max_num_batched_tokens=budget, long_prefill_token_threshold=threshold, delay=0)
    prompts = [tuple(100 * i + j for j in range(n)) for i, n in enumerate(lengths)]
    engine.add(*(request(f"r{i}", prompt, 3) for i, prompt in enumerate(prompts)))
    missing = dict(enumerate(lengths))  # prompt tokens to compute
    wanted: dict[int, int] = {}  # tokens to decode
    while not engine.scheduler.is_idle():
        assert len(engine.plans) < MAX_STEPS
        left = budget - len(wanted)
        takes = {}
        for i, n in missing.items():
            takes[i] = min(n, left, threshold or left)
            left -= takes[i]
        plan = engine.tick()
        assert {int(c.request_id[1:]): len(c.token_ids) for c in plan.prefill} == {i: n for i, n in takes.items() if n}
        assert len(plan.decode) == len(wanted)
        wanted = {i: n - 1 for i, n in wanted.items() if n > 1}
        missing = {i: n - takes[i] for i, n in missing.items()}
        wanted |= {i: 2 for i, n in missing.items() if not n}
        missing = {i: n for i, n in missing.items() if n}
    assert all(engine.seen[f"r{i}"].tokens == expected(prompt, 3) for i, prompt in enumerate(prompts))


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), reads=st.integers(12, 40), delay=st.integers(0, 2))
def test_a_step_reads_no_more_than_allowed_and_leaves_nobody_out_for_whom_there_was_enough(
    lengths: list[int], reads: int, delay: int
) -> None:
    engine = FakeEngine(max_num_kv_read_tokens=reads, max_num_batched_tokens=64, delay=delay)
    prompts = [tuple(100 * i + j for j in range(n)) for i, n in enumerate(lengths)]
    engine.add(*(request(f"r{i}", prompt, 3) for i, prompt in enumerate(prompts)))
    while not engine.scheduler.is_idle():
        assert len(engine.plans) < MAX_STEPS
        left, num_rows = reads, 0
        for s in engine.scheduler.snapshot()["sequences"]:
            output = s["generated_tokens"] + s["in_flight_tokens"]
            length = s["prompt_tokens"] + output
            if s["status"] == "running" and 0 < output < 3 and length <= left:
                left, num_rows = left - length, num_rows + 1
        plan = engine.tick()
        assert len(plan.decode) == num_rows
        assert sum(c.start + len(c.token_ids) for c in plan.prefill) <= left
    assert all(engine.seen[f"r{i}"].tokens == expected(prompt, 3) for i, prompt in enumerate(prompts))


def test_a_running_prompt_waits_when_nothing_is_left_to_read() -> None:
    engine = FakeEngine(max_num_kv_read_tokens=12, long_prefill_token_threshold=4, max_num_batched_tokens=16, delay=0)
    engine.add(request("a", tuple(range(1, 9)), 1), request("b", tuple(range(11, 19)), 1))
    steps = [[(c.request_id, c.start, c.start + len(c.token_ids)) for c in engine.tick().prefill] for _ in range(3)]
    assert steps == [[("a", 0, 4), ("b", 0, 4)], [("a", 4, 8)], [("b", 4, 8)]]  # 4 + 4, then 8 and not 8 more
    engine.run()


@pytest.mark.parametrize(("margin", "admitted"), [(0.0, ["b"]), (0.5, ["b"]), (0.51, [])])
def test_below_the_safety_margin_nothing_new_starts(margin: float, admitted: list[str]) -> None:
    engine = FakeEngine(num_pages=11, safety_margin=margin, max_num_batched_tokens=64, delay=0, caching=False)
    engine.add(request("a", (1,) * 18, 2))  # 5 pages of 10: half is free
    engine.tick()
    engine.add(request("b", (2,), 2))
    assert [a.request_id for a in engine.tick().admit] == admitted
    engine.run()
    assert engine.seen["b"].tokens == expected((2,), 2)
