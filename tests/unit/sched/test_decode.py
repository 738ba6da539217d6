"""The decode worker: fetched sequences from the first message of their peer to their end."""

from __future__ import annotations

import pytest

from jdisagg.core.requests import FinishReason, Output, Role
from jdisagg.sched.states import IllegalTransition
from tests.unit.sched.engine_fake import EOS, FakeEngine, expected, request
from tests.unit.sched.peer_fake import PROMPT, arrive, first_of, status_of


@pytest.mark.covers("D01", "D17", "D21")
def test_a_fetched_sequence_visits_every_state_once_and_computes_no_prompt_token() -> None:
    engine = FakeEngine(Role.DECODE)
    engine.add(request("a", PROMPT, 6), remote=True)
    visited = [status_of(engine, "a")]
    engine.tick()
    visited.append(status_of(engine, "a"))
    (reserved,) = engine.scheduler.take_reserved()
    assert (reserved.request_id, reserved.held_tokens, reserved.num_tokens) == ("a", 0, 10)
    assert engine.scheduler.page_table("a") == reserved.page_table
    arrive(engine, reserved, PROMPT)
    visited.append(status_of(engine, "a"))
    engine.tick()
    visited.append(status_of(engine, "a"))
    assert visited == ["prealloc", "transfer", "ready", "running"]
    engine.run()
    assert engine.seen["a"].tokens == expected(PROMPT, 6)
    assert not any(p.prefill for p in engine.plans)
    assert engine.device.num_forward_tokens == 5


@pytest.mark.covers("D11", "D23")
def test_pages_cover_the_fetched_tokens_and_decoding_starts_in_the_next_step() -> None:
    engine = FakeEngine(Role.DECODE)
    engine.add(request("a", (1, 2, 3, 4), 6), remote=True)
    engine.tick()
    (reserved,) = engine.scheduler.take_reserved()
    assert len(reserved.page_table[0]) == 1  # the first sampled token has no KV yet
    arrive(engine, reserved, (1, 2, 3, 4))
    plan = engine.tick()
    assert plan.admit[0].decodes
    assert plan.admit[0].generated_token_ids == (10,)
    assert len(plan.admit[0].page_table[0]) == 2
    assert plan.decode == (plan.admit[0].slot,)
    engine.run()


@pytest.mark.covers("P10")
def test_counts_are_the_lengths_of_the_queues() -> None:
    engine = FakeEngine(Role.DECODE, num_pages=7, caching=False)
    engine.add(*(request(f"r{i}", PROMPT, 2) for i in range(4)), remote=True)
    engine.add(request("local", (1, 2), 2))
    assert engine.scheduler.counts() == {
        **{"prealloc": 4, "waiting": 1, "transfer": 0},
        **{"ready": 0, "running": 0, "publishing": 0, "parked": 0, "forking": 0},
    }
    engine.tick()
    counts = engine.scheduler.counts()
    assert (counts["prealloc"], counts["transfer"]) == (2, 2)
    for reserved in engine.scheduler.take_reserved():
        arrive(engine, reserved, PROMPT)
    assert engine.scheduler.counts()["ready"] == 2
    for i in range(4):
        engine.scheduler.cancel(f"r{i}")
    engine.run()
    assert engine.seen["local"].tokens == expected((1, 2), 2)


@pytest.mark.covers("D20")
def test_a_request_that_ends_with_the_peers_token_is_over_in_any_state() -> None:
    engine = FakeEngine(Role.DECODE)
    engine.add(request("early", PROMPT, 1), request("late", PROMPT, 1), remote=True)
    done = first_of(PROMPT, "early", FinishReason.LENGTH)
    engine.collect([engine.scheduler.remote_first_token("early", done)])
    engine.tick()
    engine.collect([engine.scheduler.remote_first_token("late", first_of(PROMPT, "late", FinishReason.STOP))])
    assert engine.seen["early"].last.finish is FinishReason.LENGTH
    assert engine.seen["late"].last.finish is FinishReason.STOP
    assert engine.scheduler.take_reserved() == []
    engine.run()
    assert engine.plans == []


def test_the_first_token_may_come_before_memory_and_never_counts_twice() -> None:
    engine = FakeEngine(Role.DECODE)
    engine.add(request("a", PROMPT, 4), remote=True)
    engine.collect([engine.scheduler.remote_first_token("a", first_of(PROMPT, "a"))])
    engine.tick()
    again = engine.scheduler.remote_first_token("a", Output(request_id="a", token_ids=(29,)))
    assert again.token_ids == ()
    (reserved,) = engine.scheduler.take_reserved()
    assert reserved.num_tokens == 10
    arrive(engine, reserved, PROMPT, first=False)
    engine.run()
    assert engine.seen["a"].tokens == expected(PROMPT, 4)


def test_kv_without_a_first_token_or_without_pages_is_our_bug() -> None:
    engine = FakeEngine(Role.DECODE)
    engine.add(request("a", PROMPT, 4), remote=True)
    with pytest.raises(AssertionError, match="first token"):
        engine.scheduler.kv_arrived("a")
    engine.scheduler.remote_first_token("a", first_of(PROMPT, "a"))
    with pytest.raises(IllegalTransition, match="prealloc -> ready"):
        engine.scheduler.kv_arrived("a")


def test_a_request_cancelled_between_plan_and_pickup_is_not_reported_as_reserved() -> None:
    engine = FakeEngine(Role.DECODE)
    engine.add(request("a", PROMPT, 5), remote=True)
    engine.tick()
    engine.scheduler.cancel("a")
    assert engine.scheduler.take_reserved() == []
    engine.run()


def test_eos_from_the_device_ends_a_fetched_sequence() -> None:
    prompt = (30, 0)
    engine = FakeEngine(Role.DECODE)
    engine.add(request("a", prompt, 9, ignore_eos=False), remote=True)
    engine.tick()
    arrive(engine, engine.scheduler.take_reserved()[0], prompt)
    engine.run()
    assert engine.seen["a"].tokens == expected(prompt, 9, ignore_eos=False)
    assert EOS not in engine.seen["a"].tokens or engine.seen["a"].last.finish is FinishReason.STOP


@pytest.mark.covers("V07")
def test_a_sequence_without_a_slot_blocks_no_fetch_behind_it() -> None:
    engine = FakeEngine(Role.DECODE, max_num_seqs=1)
    engine.add(request("running", (1, 2), 9), request("waits", (3, 4), 2))
    engine.tick()
    engine.add(request("fetched", PROMPT, 2), remote=True)
    engine.tick()
    (reserved,) = engine.scheduler.take_reserved()
    assert status_of(engine, "waits") == "waiting"
    arrive(engine, reserved, PROMPT)
    engine.run()
    assert engine.seen["waits"].tokens == expected((3, 4), 2)
    assert engine.seen["fetched"].tokens == expected(PROMPT, 2)
