"""Out of pages: who loses them, and that nobody notices but by time."""

from __future__ import annotations

import pytest

from jdisagg.core.requests import Role
from tests.unit.sched.engine_fake import FakeEngine, expected, request
from tests.unit.sched.peer_fake import PROMPT, arrive

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)


@pytest.mark.covers("V08", "V10", "V12")
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_the_last_comer_loses_its_pages_and_every_stream_is_whole(delay: int) -> None:
    engine = FakeEngine(num_pages=8, delay=delay)  # 7 pages; each of the three may need 4
    engine.add(request("a", A, 12), request("b", B, 12), request("c", C, 12))
    engine.run()
    assert engine.scheduler.stats.preemptions > 0
    readmitted = [a.request_id for p in engine.plans for a in p.admit][3:]
    assert "a" not in readmitted  # the oldest never pays
    for name, prompt in (("a", A), ("b", B), ("c", C)):
        assert engine.seen[name].tokens == expected(prompt, 12)


@pytest.mark.covers("V03")
def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    engine = FakeEngine(num_pages=8)
    engine.add(request("a", A, 12), request("b", B, 12), request("c", C, 12), request("d", (1, 2), 3))
    while not engine.scheduler.is_idle():
        before = engine.scheduler.stats.preemptions
        plan = engine.tick()
        if engine.scheduler.stats.preemptions > before:
            assert plan.admit == ()
    assert engine.scheduler.stats.preemptions > 0


def test_under_priority_the_least_important_loses_first_and_important_ones_run_first() -> None:
    engine = FakeEngine(num_pages=8, scheduling_policy="priority", max_num_seqs=3)
    engine.add(request("low", A, 12, priority=5), request("high", B, 12, priority=0), request("mid", C, 12, priority=1))
    engine.run()
    admitted = [a.request_id for p in engine.plans for a in p.admit]
    assert admitted[:3] == ["high", "mid", "low"]
    assert set(admitted[3:]) <= {"mid", "low"}
    assert engine.scheduler.stats.preemptions > 0
    assert engine.seen["low"].tokens == expected(A, 12)


def test_a_preempted_sequence_finds_its_own_pages_in_the_prefix_cache() -> None:
    engine = FakeEngine(num_pages=12, max_num_seqs=2)
    engine.add(request("a", tuple(range(1, 17)), 16), request("b", tuple(range(3, 19)), 16))
    engine.run()
    assert engine.scheduler.stats.preemptions > 0
    assert engine.seen["b"].tokens == expected(tuple(range(3, 19)), 16)
    restarts = [c.start for p in engine.plans for c in p.prefill if c.request_id == "b"]
    assert max(restarts[1:]) > 0


@pytest.mark.covers("D08", "D09")
def test_no_decode_loses_pages_while_outputs_stay_within_the_reserve() -> None:
    engine = FakeEngine(num_pages=14, reserved_decode_tokens=12, max_num_seqs=8)
    engine.add(*(request(f"r{i}", (i + 1,) * 5, 12) for i in range(9)))
    engine.run()
    assert engine.scheduler.stats.preemptions == 0
    assert max(len(p.decode) for p in engine.plans) == 3  # (5 + 12 - 1 tokens = 4 pages each) of 13
    for i in range(9):
        assert engine.seen[f"r{i}"].tokens == expected((i + 1,) * 5, 12)


def test_without_a_reserve_the_same_load_preempts() -> None:
    engine = FakeEngine(num_pages=14, reserved_decode_tokens=0, max_num_seqs=8)
    engine.add(*(request(f"r{i}", (i + 1,) * 5, 12) for i in range(9)))
    engine.run()
    assert engine.scheduler.stats.preemptions > 0


@pytest.mark.covers("V42")
def test_the_prefix_cache_is_reset_under_load_without_touching_running_ones() -> None:
    engine = FakeEngine()
    engine.add(request("a", A, 9), request("b", (*A, 7), 9))
    for _ in range(4):
        engine.tick()
    assert engine.scheduler.reset_prefix_cache() > 0
    engine.scheduler.check()
    engine.run()
    assert engine.seen["a"].tokens == expected(A, 9)
    assert engine.scheduler.reset_prefix_cache() == 0, "those that were there leave nothing that could be found"
    engine.add(request("c", A, 9))
    engine.run()
    assert engine.scheduler.reset_prefix_cache() > 0
    engine.scheduler.check()


@pytest.mark.covers("V42")
def test_a_reset_takes_nothing_from_a_transfer_and_lets_nobody_find_what_it_brings() -> None:
    engine = FakeEngine(Role.DECODE)
    engine.add(request("a", PROMPT, 5), remote=True)
    engine.tick()
    (reserved,) = engine.scheduler.take_reserved()
    engine.scheduler.reset_prefix_cache()
    arrive(engine, reserved, PROMPT)
    engine.run()
    assert engine.seen["a"].tokens == expected(PROMPT, 5)
    assert engine.scheduler.reset_prefix_cache() == 0


@pytest.mark.covers("X18")
def test_pages_are_taken_when_their_first_token_comes_not_before() -> None:
    engine = FakeEngine(delay=0)
    engine.add(request("a", A, 5))  # 4 prompt tokens: exactly one page
    engine.tick()
    assert engine.scheduler.num_pages - engine.scheduler.num_free_pages == 1
    engine.tick()
    assert engine.scheduler.num_pages - engine.scheduler.num_free_pages == 2
    engine.run()
    assert engine.seen["a"].tokens == expected(A, 5)


def test_a_prompt_preempted_half_way_starts_its_logprobs_again() -> None:
    engine = FakeEngine(num_pages=9, max_num_batched_tokens=5, caching=False)
    long = tuple(range(1, 21))
    engine.add(request("old", (1, 2, 3, 4), 16), request("young", long, 2, prompt_logprobs=0))
    engine.run()
    assert engine.scheduler.stats.preemptions > 0
    assert [c.start for p in engine.plans for c in p.prefill if c.request_id == "young"].count(0) > 1
    first = engine.seen["young"].outputs[0].prompt_logprobs
    assert [p.token_id if p else None for p in first or ()] == [None, *long[1:]]


def test_a_prompt_whose_logprobs_are_wanted_is_computed_again_and_not_kept_on_the_host() -> None:
    engine = FakeEngine(
        num_pages=6, max_num_batched_tokens=8, long_prefill_token_threshold=3, caching=False, delay=0, host_tokens=99
    )
    prompt = tuple(range(1, 14))  # in chunks of 3: it loses its pages when all but its last token is computed
    engine.add(request("old", (1,), 16), request("young", prompt, 3, prompt_logprobs=0))
    engine.run()
    assert engine.scheduler.stats.preemptions > 0
    first = engine.seen["young"].outputs[0].prompt_logprobs
    assert [p.token_id if p else None for p in first or ()] == [None, *prompt[1:]]
