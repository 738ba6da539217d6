"""A sequence with a grammar samples when its last token is known to the host, which makes the mask; others go on meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import FinishReason, Grammar, GrammarKind, Role
from jdisagg.sched.explain import Cause
from tests.unit.sched.engine_fake import FakeEngine, expected, request
from tests.unit.sched.peer_fake import arrive

GRAMMAR = Grammar(GrammarKind.REGEX, "[a-z]*")


def test_its_row_waits_for_its_token_and_everybody_elses_does_not() -> None:
    engine = FakeEngine(delay=1)
    engine.add(request("bound", (1, 2, 3), 4, grammar=GRAMMAR), request("free", (4, 5, 6), 4))
    first = engine.step()
    assert (len(first.prefill), first.by_grammar) == (2, True)
    second = engine.step()
    (free,) = (chunk.slot for chunk in first.prefill if chunk.request_id == "free")
    assert (second.decode, second.by_grammar) == ((free,), False)
    wait = engine.scheduler.why_not("bound")
    assert wait is not None
    assert wait.cause is Cause.TOKEN
    engine.commit_one()
    third = engine.step()
    assert len(third.decode) == 2
    assert third.by_grammar
    engine.run()
    assert engine.seen["bound"].tokens == expected((1, 2, 3), 4)
    assert engine.seen["free"].tokens == expected((4, 5, 6), 4)


def test_a_prompt_of_several_chunks_says_so_with_the_one_that_samples() -> None:
    engine = FakeEngine(delay=1, max_num_batched_tokens=4)
    engine.add(request("bound", tuple(range(1, 10)), 2, grammar=GRAMMAR))
    assert [engine.step().by_grammar for _ in range(3)] == [False, False, True]
    assert engine.step().is_empty
    engine.run()


def test_several_steps_at_once_are_for_those_without() -> None:
    engine = FakeEngine(num_scheduler_steps=4, delay=0)
    engine.add(request("bound", (1, 2, 3), 3, grammar=GRAMMAR), request("free", (4, 5, 6), 12))
    engine.run()
    num_steps = [plan.num_steps for plan in engine.plans if plan.decode]
    assert num_steps[:2] == [1, 1], "while it runs"
    assert max(num_steps) == 4, "when it has ended"
    assert engine.seen["bound"].tokens == expected((1, 2, 3), 3)
    assert engine.seen["free"].tokens == expected((4, 5, 6), 12)


def test_choices_of_one_prompt_each_begin_with_the_grammar() -> None:
    engine = FakeEngine()
    engine.add(*(request(name, (1, 2, 3, 4, 5), 3, grammar=GRAMMAR, fork_group="g") for name in "abc"))
    engine.run()
    assert engine.scheduler.stats.forks == 2
    assert all(engine.seen[name].tokens == expected((1, 2, 3, 4, 5), 3) for name in "abc")


def test_one_whose_pages_are_taken_begins_behind_the_tokens_it_has() -> None:
    engine = FakeEngine(num_pages=9, caching=False)
    prompts = {"a": tuple(range(1, 10)), "b": tuple(range(11, 20))}
    engine.add(*(request(name, prompt, 12, grammar=GRAMMAR) for name, prompt in prompts.items()))
    engine.run()
    assert engine.scheduler.stats.preemptions > 0
    for name, prompt in prompts.items():
        assert engine.seen[name].tokens == expected(prompt, 12)


def test_a_decode_worker_goes_on_from_the_token_that_came_with_the_kv() -> None:
    engine = FakeEngine(Role.DECODE)
    engine.add(request("r", (1, 2, 3, 4, 5), 4, grammar=GRAMMAR), remote=True)
    engine.tick()
    (reserved,) = engine.scheduler.take_reserved()
    arrive(engine, reserved, (1, 2, 3, 4, 5))
    engine.run()
    assert engine.seen["r"].tokens == expected((1, 2, 3, 4, 5), 4)


@pytest.mark.parametrize("role", [Role.UNIFIED, Role.PREFILL])
def test_one_whose_grammar_cannot_go_on_is_refused_alone_and_leaves_nothing(role: Role) -> None:
    engine = FakeEngine(role)
    engine.add(request("bound", (1, 2, 3), 4, grammar=GRAMMAR), request("other", (4, 5, 6), 1))
    engine.step()
    result = engine.in_flight.popleft()
    bound, other = result.sampled
    refused = replace(bound, refused="a limit was met")
    engine.collect(engine.scheduler.commit(replace(result, sampled=(refused, other))))
    last = engine.seen["bound"].last
    assert (last.finish, engine.seen["bound"].tokens) == (FinishReason.ERROR, [])
    assert isinstance(last.error, InvalidRequest)
    assert "a limit was met" in last.error.message
    assert engine.seen["other"].tokens == expected((4, 5, 6), 1)
    if role is Role.PREFILL:
        engine.drop("other")
    engine.run()


def test_a_refusal_in_the_middle_ends_it_though_its_token_looks_like_any_other() -> None:
    engine = FakeEngine(delay=0)
    engine.add(request("bound", (1, 2, 3), 9, grammar=GRAMMAR))
    for _ in range(3):
        engine.tick()
    engine.step()
    result = engine.in_flight.popleft()
    (bound,) = result.sampled
    engine.collect(engine.scheduler.commit(replace(result, sampled=(replace(bound, refused="it is stuck"),))))
    assert engine.seen["bound"].tokens == expected((1, 2, 3), 3)
    assert isinstance(engine.seen["bound"].last.error, InvalidRequest)
    engine.run()
