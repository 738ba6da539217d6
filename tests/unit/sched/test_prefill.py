"""The prefill worker: prompts only, one token each, pages kept until the hand-off is over."""

from __future__ import annotations

import pytest

from jdisagg.core.errors import HandoffLost, InvalidRequest
from jdisagg.core.requests import FinishReason, Role
from tests.unit.sched.engine_fake import FakeEngine, expected, request

PROMPT = tuple(range(1, 24))


def run_until_published(engine: FakeEngine, num: int) -> None:
    """Tick until so many sequences wait for the end of their hand-off."""
    for _ in range(60):
        if engine.scheduler.counts()["publishing"] == num:
            return
        engine.tick()
    raise AssertionError(engine.scheduler.snapshot())


@pytest.mark.covers("P03", "V22", "V23")
def test_the_first_token_ends_computing_and_the_pages_stay_until_released() -> None:
    engine = FakeEngine(Role.PREFILL)
    engine.add(request("a", PROMPT, 40))
    run_until_published(engine, 1)
    assert engine.seen["a"].tokens == expected(PROMPT, 1)
    assert engine.seen["a"].last.finish is None
    assert engine.scheduler.num_pages - engine.scheduler.num_free_pages == 6  # the prompt's, none for the output
    assert engine.device.read(engine.scheduler.page_table("a")[0], 23) == list(PROMPT)
    engine.scheduler.cancel("a")
    engine.scheduler.cancel("a")
    engine.run()
    assert not any(p.decode for p in engine.plans)


def test_a_request_that_ends_with_its_first_token_says_so_and_is_published_all_the_same() -> None:
    engine = FakeEngine(Role.PREFILL)
    engine.add(request("a", PROMPT, 1))
    run_until_published(engine, 1)
    assert engine.seen["a"].last.finish is FinishReason.LENGTH
    assert engine.scheduler.fail("a", HandoffLost("late")) is None  # its last output was sent
    engine.run()


def test_a_published_request_is_freed_at_its_deadline_even_if_nobody_releases_it() -> None:
    engine = FakeEngine(Role.PREFILL)
    engine.add(request("ended", PROMPT, 1, deadline_s=5.0), request("not-ended", PROMPT, 9, deadline_s=5.0))
    run_until_published(engine, 2)
    engine.now_s = 6.0
    engine.tick()
    assert engine.seen["ended"].last.error is None
    assert engine.seen["not-ended"].last.error is not None
    engine.run()


def test_a_released_prompt_is_found_by_the_next_attempt() -> None:
    engine = FakeEngine(Role.PREFILL)
    engine.add(request("a#1", PROMPT, 9))
    run_until_published(engine, 1)
    engine.add(request("a#2", PROMPT, 9))
    assert engine.scheduler.held_tokens("a#2") == 20
    engine.scheduler.cancel("a#1")
    run_until_published(engine, 1)
    assert engine.seen["a#2"].tokens == expected(PROMPT, 1)
    assert engine.seen["a#2"].last.cached_tokens == 20
    assert engine.device.num_forward_tokens == 23 + 3
    engine.scheduler.cancel("a#2")
    engine.run()


def test_a_resumed_request_is_recomputed_with_its_generated_tokens() -> None:
    whole = expected(PROMPT, 6)
    engine = FakeEngine(Role.PREFILL)
    engine.add(request("a", PROMPT, 6, generated=tuple(whole[:5])))
    run_until_published(engine, 1)
    assert engine.seen["a"].tokens == whole[5:]
    assert engine.seen["a"].last.finish is FinishReason.LENGTH
    engine.scheduler.cancel("a")
    engine.run()


def test_what_is_cancelled_before_its_first_token_has_none() -> None:
    engine = FakeEngine(Role.PREFILL, max_num_batched_tokens=4)
    engine.add(request("a", PROMPT, 6))
    engine.tick()
    engine.scheduler.cancel("a")
    engine.run()
    assert engine.seen == {}


def test_only_the_prompt_has_to_fit() -> None:
    engine = FakeEngine(Role.PREFILL, num_pages=7, max_model_len=30)
    engine.add(request("a", PROMPT, 1000))
    with pytest.raises(InvalidRequest, match="KV pool holds 24 tokens"):
        engine.add(request("b", (1,) * 25, 1))
    run_until_published(engine, 1)
    engine.scheduler.cancel("a")
    engine.run()


def test_prompts_wait_while_published_pages_fill_the_pool() -> None:
    engine = FakeEngine(Role.PREFILL, num_pages=13, caching=False)
    engine.add(*(request(f"r{i}", PROMPT, 9) for i in range(3)))
    run_until_published(engine, 2)
    for _ in range(3):
        engine.tick()
    assert engine.scheduler.counts()["waiting"] == 1
    engine.scheduler.cancel("r0")
    run_until_published(engine, 2)
    assert engine.seen["r2"].tokens == expected(PROMPT, 1)
    for name in ("r1", "r2"):
        engine.scheduler.cancel(name)
    engine.run()
