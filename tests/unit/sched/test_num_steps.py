"""How many decode steps one dispatch makes: as many as asked for while nothing needs the host and all fits, else one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jdisagg.core.requests import FinishReason, Role
from tests.unit.sched.engine_fake import FakeEngine, expected, request
from tests.unit.sched.peer_fake import arrive


def decoding(num_prompt: int, max_tokens: int, steps: int, **options: Any) -> FakeEngine:
    """Two sequences whose first token is in flight; every number of pages and tokens is per sequence."""
    engine = FakeEngine(num_scheduler_steps=steps, caching=False, max_num_batched_tokens=64, delay=0, **options)
    engine.add(*(request(name, (i + 1,) * num_prompt, max_tokens) for i, name in enumerate("ab")))
    engine.step()
    return engine


@pytest.mark.parametrize(("steps", "made"), [(1, 1), (2, 2), (6, 6), (8, 8), (9, 8)])
def test_one_dispatch_makes_the_steps_asked_for_but_no_more_than_anybody_wants(steps: int, made: int) -> None:
    engine = decoding(3, 9, steps)
    plan = engine.step()
    assert plan.num_steps == made
    assert engine.scheduler.stats.decode_tokens == 2 * made
    engine.run()
    assert engine.seen["a"].tokens == expected((1, 1, 1), 9)


def test_the_last_token_is_made_in_one_step() -> None:
    engine = decoding(3, 2, 4)
    assert engine.step().num_steps == 1
    engine.run()
    assert all(plan.num_steps == 1 for plan in engine.plans)  # the one that only evicts included


@pytest.mark.parametrize(("num_good", "got"), [(0, 0), (1, 0), (2, 2), (3, 2)])
def test_logits_behind_the_last_token_may_be_anything(num_good: int, got: int) -> None:
    engine = FakeEngine(num_scheduler_steps=4, delay=0)
    engine.add(request("a", (1, 2, 3), 3), request("b", (5, 6, 7), 9))
    engine.tick()
    assert engine.step().num_steps == 4  # `a` wants two of them
    result = engine.in_flight.pop()
    a, b = sorted(result.sampled, key=lambda one: one.slot)
    a = replace(a, token_ids=a.token_ids[: num_good + 1], bad="NaN")
    engine.collect(engine.scheduler.commit(replace(result, sampled=(a, b))))
    assert (engine.seen["a"].last.error is None) == (got > 0)
    assert engine.seen["a"].tokens == expected((1, 2, 3), 1 + got)
    engine.run()
    assert engine.seen["b"].tokens == expected((5, 6, 7), 9)


def test_the_kv_of_one_that_ends_before_its_bad_logits_is_not_searched() -> None:
    engine = FakeEngine(num_scheduler_steps=4, delay=0)
    engine.add(request("a", (1, 2, 3), 3), request("b", (5, 6, 7), 9))
    engine.tick()
    assert engine.step().num_steps == 4  # `a` wants two of them
    result = engine.in_flight[-1]
    a, b = (replace(one, token_ids=one.token_ids[:3], bad="NaN") for one in sorted(result.sampled, key=lambda one: one.slot))
    scheduler = engine.scheduler
    assert scheduler.kv_of_failed(result.step_id, a) is None
    assert scheduler.kv_of_failed(result.step_id, b) == (scheduler.page_table("b"), 7)
    engine.run()


def test_logits_behind_a_stop_may_be_anything() -> None:
    engine = FakeEngine(num_scheduler_steps=4, delay=0)
    stop = expected((1, 2, 3), 3)[-1]
    engine.add(request("a", (1, 2, 3), 9, stop_token_ids=(stop,), logprobs=0))
    engine.tick()
    assert engine.step().num_steps == 4
    result = engine.in_flight.pop()
    (a,) = result.sampled
    assert a.logprobs is not None
    a = replace(a, token_ids=a.token_ids[:3], logprobs=a.logprobs[:2], bad="NaN")
    engine.collect(engine.scheduler.commit(replace(result, sampled=(a,))))
    assert engine.seen["a"].tokens == expected((1, 2, 3), 3)
    assert engine.seen["a"].last.logprobs == a.logprobs
    assert engine.seen["a"].last.finish is FinishReason.STOP
    engine.run()


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "steps", "num_pages", "made"),
    [
        (3, 9, 6, 6, 6),  # tokens 3 to 8 of each: two pages more for each, four are free
        (3, 9, 6, 5, 1),
        (2, 6, 2, 2, 2),  # tokens 2 and 3: their pages are there, and none is free
        (2, 6, 3, 3, 1),
        (2, 6, 3, 4, 3),
    ],
)
def test_pages_of_all_steps_have_to_be_free(num_prompt: int, max_tokens: int, steps: int, num_pages: int, made: int) -> None:
    engine = decoding(num_prompt, max_tokens, steps, num_pages=num_pages + 1)
    assert engine.step().num_steps == made
    engine.run()
    assert engine.seen["b"].tokens == expected((2,) * num_prompt, max_tokens)


@pytest.mark.parametrize(("reads", "made"), [(20, 6), (19, 1)])
def test_what_the_last_step_reads_has_to_be_allowed(reads: int, made: int) -> None:
    """Each has 3 tokens and one in flight, and six more to come."""
    engine = decoding(3, 9, 6, max_num_kv_read_tokens=reads)
    assert engine.step().num_steps == made
    engine.run()


def test_whoever_wants_less_reserves_less() -> None:
    engine = FakeEngine(num_scheduler_steps=4, caching=False, max_num_batched_tokens=64)
    engine.add(request("short", (1, 2, 3), 2), request("long", (4, 5, 6), 9))
    engine.step()
    plan = engine.step()
    assert plan.num_steps == 4
    assert [(append.slot, append.index) for append in plan.pages] == [(1, 1)]  # tokens 3 to 6; "short" feeds token 3 alone
    engine.run()
    assert engine.seen["short"].tokens == expected((1, 2, 3), 2)


def test_a_prompt_that_is_not_whole_or_waits_needs_the_host() -> None:
    engine = FakeEngine(num_scheduler_steps=4, max_num_batched_tokens=6, max_num_seqs=3, delay=0)
    engine.add(request("a", (1,), 30))
    engine.tick()
    engine.add(request("prompt", tuple(range(2, 17)), 30))
    assert [engine.tick().num_steps for _ in range(5)] == [1, 1, 1, 4, 4]  # 5 + 5 + 5 tokens
    engine.add(request("c", (3,), 30), request("no-slot", (4,), 30))
    assert [engine.tick().num_steps for _ in range(3)] == [1, 1, 1]
    engine.scheduler.cancel("no-slot")
    assert engine.tick().num_steps == 4
    engine.run()


def test_sequences_that_arrived_beside_running_ones_take_the_pages_of_one_token() -> None:
    engine = FakeEngine(Role.DECODE, num_scheduler_steps=4, delay=0)
    engine.add(request("running", (1,), 30))
    engine.tick()
    engine.add(request("a", (1, 2, 3), 9), remote=True)
    engine.step()
    (reserved,) = engine.scheduler.take_reserved()
    arrive(engine, reserved, (1, 2, 3))
    (admit,) = engine.step().admit
    assert [len(group) for group in admit.page_table] == [1]
    engine.run()
    assert engine.seen["a"].tokens == expected((1, 2, 3), 9)
