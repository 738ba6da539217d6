"""What a prefix cache spares a prompt: at least one token is computed, and each prompt is counted once."""

from __future__ import annotations

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
