"""What a prefix cache spares a prompt: at least one token is computed, and each prompt is counted once."""

from __future__ import annotations

import pytest

from tests.unit.sched.engine_fake import FakeEngine, expected, request


def test_at_least_one_token_is_computed_for_its_logits() -> None:
    engine = FakeEngine()
    for num_prompt, cached in ((8, 4), (9, 8), (12, 8), (13, 12)):
        prompt = tuple(range(100 * num_prompt, 101 * num_prompt))[:num_prompt]
        engine.add(request("warm", prompt, 1))
        engine.run()
        engine.add(request("again", prompt, 3))
        plan = engine.tick()
        assert [c.start for c in plan.prefill] == [cached]
        engine.run()
        assert engine.seen.pop("again").last.cached_tokens == cached
        engine.seen.clear()
    assert engine.scheduler.stats.prefix_hit_tokens == 4 + 8 + 8 + 12
    assert engine.scheduler.stats.prefix_query_tokens == 2 * (8 + 9 + 12 + 13)


def test_prompts_whose_every_position_is_wanted_find_nothing() -> None:
    engine = FakeEngine()
    prompt = tuple(range(1, 11))
    engine.add(request("warm", prompt, 1))
    engine.run()
    engine.add(request("a", prompt, 2, prompt_logprobs=0))
    assert engine.scheduler.held_tokens("a") == 0
    engine.run()
    assert engine.seen["a"].last.cached_tokens == 0


def test_a_prompt_is_counted_once_though_it_is_preempted() -> None:
    engine = FakeEngine(num_pages=9, reserved_decode_tokens=0, max_num_batched_tokens=64)  # one chunk each time it comes
    prompts = {name: tuple(range(start, start + 9)) for name, start in (("a", 100), ("b", 200))}
    engine.add(*(request(name, prompt, 16) for name, prompt in prompts.items()))
    engine.run()
    assert {name: engine.seen[name].tokens for name in prompts} == {n: expected(p, 16) for n, p in prompts.items()}
    stats = engine.scheduler.stats
    assert stats.preemptions > 0
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (18, 0)
    assert stats.refound_tokens == sum(chunk.start for plan in engine.plans for chunk in plan.prefill) > 0


@pytest.mark.parametrize("at_once", [False, True])
def test_the_head_of_a_conversation_stays_as_long_as_its_tail_whoever_computed_it(at_once: bool) -> None:
    engine = FakeEngine(num_pages=33, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=80)
    prompt = tuple(range(1, 26))
    engine.add(request("a", prompt, 2))
    if not at_once:
        engine.run()
    engine.add(request("b", prompt, 28))  # of a prompt computed at once the pages of `a` are those that are found
    engine.run()
    engine.add(request("other", tuple(7 * i % 30 for i in range(78)), 2))  # wants 20 of 32 pages
    engine.run()
    assert _found_by_next_turn(engine, (*prompt, *expected(prompt, 28))) == 48


@pytest.mark.parametrize("group", ["", "g"])
def test_a_choice_offers_the_pages_it_shares_when_nobody_else_can(group: str) -> None:
    engine = FakeEngine(num_pages=24, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    prompt = tuple(range(1, 14))
    engine.add(request("a", prompt, 2))  # found in place of the pages of `first`
    engine.add(request("first", prompt, 3, fork_group=group), request("second", prompt, 28, fork_group=group))
    for tick in range(60):
        if tick in (6, 9):  # these need all that nobody holds
            engine.add(request(f"other-{tick}", tuple((7 * tick + i) % 30 for i in range(50)), 2))
        engine.tick()
    engine.run()
    assert engine.scheduler.stats.forks == bool(group)
    assert _found_by_next_turn(engine, (*prompt, *expected(prompt, 28))) == 40


def _found_by_next_turn(engine: FakeEngine, so_far: tuple[int, ...]) -> int:
    before = engine.scheduler.stats.prefix_hit_tokens
    engine.add(request("next", (*so_far, 5, 6), 2))
    engine.run()
    return engine.scheduler.stats.prefix_hit_tokens - before
