"""Memory of sequences that are fetched: who gets pages, in what order, and what they hold before."""

from __future__ import annotations

import pytest

from jdisagg.core.requests import Role
from tests.unit.sched.engine_fake import FakeEngine, expected, request
from tests.unit.sched.peer_fake import PROMPT, arrive


@pytest.mark.covers("D05")
def test_an_unready_head_is_passed_over_and_memory_goes_in_order_of_arrival() -> None:
    engine = FakeEngine(Role.DECODE, num_pages=8)
    engine.add(request("a", PROMPT, 3), remote=True, is_open=False)
    engine.add(request("b", PROMPT[:8], 3), remote=True)
    engine.tick()
    (b,) = engine.scheduler.take_reserved()
    assert b.request_id == "b"
    engine.scheduler.peer_ready("a")
    engine.add(request("c", PROMPT[:3], 3), remote=True)
    engine.tick()
    assert [r.request_id for r in engine.scheduler.take_reserved()] == ["a", "c"]
    for name in ("a", "b", "c"):
        engine.scheduler.cancel(name)
    engine.run()


@pytest.mark.covers("D10")
def test_admissions_of_one_tick_fit_together_and_the_first_that_does_not_stops_the_rest() -> None:
    engine = FakeEngine(Role.DECODE, num_pages=11, caching=False, max_bypass=0)
    engine.add(*(request(f"r{i}", PROMPT, 2) for i in range(10)), remote=True)
    engine.add(request("tiny", (1,), 1), remote=True)
    engine.tick()
    assert [r.request_id for r in engine.scheduler.take_reserved()] == ["r0", "r1", "r2"]  # 3 pages each of 10
    assert engine.scheduler.counts()["prealloc"] == 8
    for name in [f"r{i}" for i in range(10)] + ["tiny"]:
        engine.scheduler.cancel(name)
    engine.run()


@pytest.mark.covers("V18", "V16")
def test_pages_on_their_way_are_found_by_nobody_and_block_nobody() -> None:
    engine = FakeEngine(Role.DECODE)
    engine.add(request("slow", PROMPT, 3), remote=True)
    engine.tick()
    (slow,) = engine.scheduler.take_reserved()
    engine.add(request("local", PROMPT, 3))
    engine.tick()
    assert engine.plans[-1].prefill[0].start == 0
    while "local" not in engine.seen or engine.seen["local"].last.finish is None:
        engine.tick()
    assert engine.seen["local"].tokens == expected(PROMPT, 3)
    arrive(engine, slow, PROMPT)
    engine.run()
    assert engine.seen["slow"].tokens == expected(PROMPT, 3)


@pytest.mark.covers("V20", "D18")
def test_held_tokens_count_as_cached_and_survive_pressure() -> None:
    engine = FakeEngine(Role.DECODE, num_pages=9)
    engine.add(request("a", PROMPT, 1))
    engine.run()
    longer = (*PROMPT[:9], 20, 21, 22)
    engine.add(request("b", longer, 3), remote=True, is_open=False)
    assert engine.scheduler.held_tokens("b") == 8
    assert engine.scheduler.num_free_pages == 6
    engine.add(request("pressure", (9,) * 24, 1))  # needs all six pages that are left
    while "pressure" not in engine.seen:
        engine.tick()
    engine.scheduler.peer_ready("b")
    for _ in range(3):
        engine.tick()
    (reserved,) = engine.scheduler.take_reserved()
    assert (reserved.held_tokens, reserved.num_tokens) == (8, 12)
    arrive(engine, reserved, longer)
    engine.run()
    assert engine.seen["b"].tokens == expected(longer, 3)
    assert engine.seen["b"].last.cached_tokens == 8


def test_a_limit_caps_what_is_held() -> None:
    engine = FakeEngine(Role.DECODE)
    engine.add(request("a", PROMPT, 1))
    engine.run()
    engine.add(request("b", PROMPT, 1))
    engine.scheduler.fetch_first("b", 7)
    assert engine.scheduler.held_tokens("b") == 4
    engine.scheduler.cancel("b")
    assert engine.scheduler.held_tokens("b") == 0
    engine.run()


def test_pins_of_waiting_sequences_never_lock_each_other_out() -> None:
    engine = FakeEngine(Role.DECODE, num_pages=10)
    prefixes = [(p,) * 8 for p in (1, 2, 3, 4)]
    for i, prefix in enumerate(prefixes):
        engine.add(request(f"seed{i}", prefix, 1))
        engine.run()
    for i, prefix in enumerate(prefixes):  # each could pin 2 of 9 pages and needs 7 in all
        engine.add(request(f"r{i}", (*prefix, *range(17)), 3), remote=True)
    for _ in range(60):
        engine.tick()
        for reserved in engine.scheduler.take_reserved():
            arrive(engine, reserved, (*prefixes[int(reserved.request_id[1])], *range(17)))
        if engine.scheduler.is_idle():
            break
    for i, prefix in enumerate(prefixes):
        assert engine.seen[f"r{i}"].tokens == expected((*prefix, *range(17)), 3)
    engine.run()


def test_an_urgent_request_that_only_pins_keep_out_waits_for_their_owners() -> None:
    engine = FakeEngine(Role.DECODE, num_pages=10, scheduling_policy="priority")
    engine.add(request("seed", PROMPT[:8], 1))
    engine.run()
    pinner = (*PROMPT[:8], 1)
    engine.add(request("pinner", pinner, 3, priority=5), remote=True)
    assert engine.scheduler.held_tokens("pinner") == 8
    urgent = (7,) * 32  # eight of nine pages, two are pinned
    engine.add(request("urgent", urgent, 2, priority=0), remote=True)
    prompts = {"pinner": pinner, "urgent": urgent}
    order: list[str] = []
    for _ in range(30):
        engine.tick()
        for reserved in engine.scheduler.take_reserved():
            order.append(reserved.request_id)
            arrive(engine, reserved, prompts[reserved.request_id])
    engine.run()
    assert order == ["pinner", "urgent"]
    assert engine.seen["urgent"].tokens == expected(urgent, 2)


def test_arrived_sequences_that_lack_their_next_page_do_not_wait_for_each_other() -> None:
    engine = FakeEngine(Role.DECODE, num_pages=3, caching=False)
    prompts = {"old": (1, 2, 3, 4), "young": (5, 6, 7, 8)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 5), remote=True)  # one page each, and one more to go on
    engine.tick()
    for reserved in engine.scheduler.take_reserved():
        arrive(engine, reserved, prompts[reserved.request_id])
    assert engine.scheduler.num_free_pages == 0
    engine.run()
    assert engine.scheduler.stats.retractions == 1
    for name, prompt in prompts.items():
        assert engine.seen[name].tokens == expected(prompt, 5)
