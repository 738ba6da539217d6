"""The decode worker: fetched sequences, their memory, and what happens when fetching fails."""

from __future__ import annotations

import pytest

from jdisagg.core.errors import HandoffLost
from jdisagg.core.requests import FinishReason, Output, Role
from jdisagg.sched.states import IllegalTransition
from jdisagg.sched.views import Reserved
from tests.unit.sched.engine_fake import EOS, FakeEngine, expected, next_token, request

PROMPT = tuple(range(1, 11))  # 10 tokens: two full pages and a half


def first_of(prompt: tuple[int, ...], request_id: str, finish: FinishReason | None = None) -> Output:
    """What the peer answers."""
    return Output(request_id=request_id, token_ids=(next_token(prompt),), finish=finish)


def arrive(engine: FakeEngine, reserved: Reserved, tokens: tuple[int, ...], *, first: bool = True) -> None:
    """The peer's first token and all KV of one reserved sequence."""
    if first:
        output = engine.scheduler.remote_first_token(reserved.request_id, first_of(tokens, reserved.request_id), engine.now_s)
        engine.collect([output])
    engine.device.import_tokens(reserved.page_table, tokens, reserved.held_tokens, reserved.num_tokens)
    engine.scheduler.kv_arrived(reserved.request_id, engine.now_s)


def status_of(engine: FakeEngine, request_id: str) -> str:
    """Where a request is."""
    return next((s["status"] for s in engine.scheduler.snapshot()["sequences"] if s["request_id"] == request_id), "gone")


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
    engine.add(request("b", PROMPT, 1), remote=True, held_limit=7)
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


@pytest.mark.covers("D20")
def test_a_request_that_ends_with_the_peers_token_is_over_in_any_state() -> None:
    engine = FakeEngine(Role.DECODE)
    engine.add(request("early", PROMPT, 1), request("late", PROMPT, 1), remote=True)
    done = first_of(PROMPT, "early", FinishReason.LENGTH)
    engine.collect([engine.scheduler.remote_first_token("early", done, 0.0)])
    engine.tick()
    engine.collect([engine.scheduler.remote_first_token("late", first_of(PROMPT, "late", FinishReason.STOP), 0.0)])
    assert engine.seen["early"].last.finish is FinishReason.LENGTH
    assert engine.seen["late"].last.finish is FinishReason.STOP
    assert engine.scheduler.take_reserved() == []
    engine.run()
    assert engine.plans == []


def test_the_first_token_may_come_before_memory_and_never_counts_twice() -> None:
    engine = FakeEngine(Role.DECODE)
    engine.add(request("a", PROMPT, 4), remote=True)
    engine.collect([engine.scheduler.remote_first_token("a", first_of(PROMPT, "a"), 0.0)])
    engine.tick()
    again = engine.scheduler.remote_first_token("a", Output(request_id="a", token_ids=(29,)), 0.0)
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
        engine.scheduler.kv_arrived("a", 0.0)
    engine.scheduler.remote_first_token("a", first_of(PROMPT, "a"), 0.0)
    with pytest.raises(IllegalTransition, match="prealloc -> ready"):
        engine.scheduler.kv_arrived("a", 0.0)


@pytest.mark.covers("V25")
@pytest.mark.parametrize("stage", ["prealloc", "transfer", "transfer-with-token", "ready"])
def test_falling_back_keeps_the_place_in_the_queue_and_what_was_sent(stage: str) -> None:
    engine = FakeEngine(Role.DECODE, max_num_seqs=1)
    engine.add(request("a", PROMPT, 5), remote=True)
    if stage != "prealloc":
        engine.tick()
        (reserved,) = engine.scheduler.take_reserved()
        if stage == "transfer-with-token":
            engine.collect([engine.scheduler.remote_first_token("a", first_of(PROMPT, "a"), 0.0)])
        elif stage == "ready":
            arrive(engine, reserved, PROMPT)
    engine.add(request("b", (1, 2), 5))
    assert engine.scheduler.compute_locally("a")
    engine.tick()
    assert engine.plans[-1].admit[0].request_id == "a"
    engine.run()
    assert engine.seen["a"].tokens == expected(PROMPT, 5)
    assert engine.seen["b"].tokens == expected((1, 2), 5)
    assert not engine.scheduler.compute_locally("a")


@pytest.mark.covers("V24")
@pytest.mark.parametrize("held", [0, 3, 4, 9, 10])
def test_kv_that_arrived_before_the_peer_died_is_not_computed_again(held: int) -> None:
    """What is missing starts at the first bad or missing page of this request; a second request with the same prefix is not
    held up and computes nothing twice."""
    engine = FakeEngine(Role.DECODE)
    engine.add(request("a", PROMPT, 5), remote=True)
    engine.tick()
    (reserved,) = engine.scheduler.take_reserved()
    engine.device.import_tokens(reserved.page_table, PROMPT, 0, held)
    assert engine.scheduler.compute_locally("a", held)
    engine.add(request("b", PROMPT, 5))
    engine.run()
    kept = min(held, len(PROMPT) - 1) // 4 * 4
    chunks = [c for p in engine.plans for c in p.prefill]
    assert next(c.start for c in chunks if c.request_id == "a") == kept
    assert sum(len(c.token_ids) for c in chunks if c.request_id == "a") == len(PROMPT) - kept
    assert engine.seen["a"].tokens == engine.seen["b"].tokens == expected(PROMPT, 5)
    assert engine.seen["a"].last.cached_tokens == 0  # none of it was in a prefix cache when it was asked for


@pytest.mark.covers("D13")
def test_a_failed_fetch_fails_its_request_alone() -> None:
    engine = FakeEngine(Role.DECODE)
    engine.add(request("a", PROMPT, 5), request("b", PROMPT, 5), remote=True)
    engine.tick()
    _, b = engine.scheduler.take_reserved()
    output = engine.scheduler.fail("a", HandoffLost("no peer left"))
    assert output is not None
    assert output.finish is FinishReason.ERROR
    assert engine.scheduler.fail("a", HandoffLost("again")) is None
    arrive(engine, b, PROMPT)
    engine.run()
    assert engine.seen["b"].tokens == expected(PROMPT, 5)


def test_a_request_cancelled_between_plan_and_pickup_is_not_reported_as_reserved() -> None:
    engine = FakeEngine(Role.DECODE)
    engine.add(request("a", PROMPT, 5), remote=True)
    engine.tick()
    engine.scheduler.cancel("a")
    assert engine.scheduler.take_reserved() == []
    engine.run()


@pytest.mark.covers("D03", "D19", "X03")
@pytest.mark.parametrize("local_prefill", [True, False])
def test_a_retracted_sequence_resumes_first_with_every_token_it_had(local_prefill: bool) -> None:
    engine = FakeEngine(Role.DECODE, num_pages=8, local_prefill=local_prefill, caching=False)
    prompts = {"a": (1, 2, 3, 4), "b": (5, 6, 7, 8), "new": (9, 9)}
    engine.add(request("a", prompts["a"], 16), request("b", prompts["b"], 16), remote=True)
    retracted: list[str] = []
    order: list[str] = []
    for _ in range(80):
        order += [a.request_id for a in engine.tick().admit]
        for again in engine.scheduler.take_retracted():
            retracted.append(again.request_id)
            assert list(again.generated_token_ids) == engine.seen[again.request_id].tokens
            prompts[again.request_id] = again.token_ids
            engine.scheduler.peer_ready(again.request_id)
        if engine.scheduler.stats.retractions and "new" not in engine.seen and status_of(engine, "new") == "gone":
            engine.add(request("new", prompts["new"], 2), remote=True)
        for reserved in engine.scheduler.take_reserved():
            arrive(engine, reserved, prompts[reserved.request_id])
    engine.run()
    assert engine.scheduler.stats.retractions > 0
    assert order.index("b", 2) < order.index("new")
    assert set(retracted) == (set() if local_prefill else {"b"})
    assert engine.seen["a"].tokens == expected((1, 2, 3, 4), 16)
    assert engine.seen["b"].tokens == expected((5, 6, 7, 8), 16)
    assert any(p.prefill for p in engine.plans) == local_prefill


def test_a_retracted_sequence_gets_no_pages_before_a_peer_has_begun_with_it_anew() -> None:
    engine = FakeEngine(Role.DECODE, num_pages=8, local_prefill=False, caching=False)
    prompts = {"a": (1, 2, 3, 4), "b": (5, 6, 7, 8)}
    engine.add(*(request(name, prompt, 16) for name, prompt in prompts.items()), remote=True)
    engine.tick()
    for reserved in engine.scheduler.take_reserved():
        arrive(engine, reserved, prompts[reserved.request_id])
    while engine.seen.get("a") is None or engine.seen["a"].last.finish is None:
        engine.tick()
    for _ in range(3):
        engine.tick()
    assert status_of(engine, "b") == "prealloc"
    assert engine.scheduler.take_reserved() == []
    (again,) = engine.scheduler.take_retracted()
    engine.scheduler.peer_ready("b")
    engine.tick()
    (reserved,) = engine.scheduler.take_reserved()
    arrive(engine, reserved, again.token_ids)
    engine.run()
    assert engine.seen["b"].tokens == expected(prompts["b"], 16)


def test_a_sequence_that_waits_for_a_slot_loses_its_pages_before_an_older_running_one() -> None:
    engine = FakeEngine(Role.DECODE, num_pages=6, max_num_seqs=1, caching=False)
    engine.add(request("old", (1, 2, 3, 4), 14), request("young", (5, 6, 7, 8, 9), 2), remote=True)
    engine.tick()
    prompts = {"old": (1, 2, 3, 4), "young": (5, 6, 7, 8, 9)}
    for reserved in engine.scheduler.take_reserved():
        arrive(engine, reserved, prompts[reserved.request_id])
    engine.run()
    assert engine.scheduler.stats.retractions == 1
    assert engine.seen["old"].tokens == expected((1, 2, 3, 4), 14)
    assert engine.seen["young"].tokens == expected((5, 6, 7, 8, 9), 2)


def test_eos_from_the_device_ends_a_fetched_sequence() -> None:
    prompt = (30, 0)
    engine = FakeEngine(Role.DECODE)
    engine.add(request("a", prompt, 9, ignore_eos=False), remote=True)
    engine.tick()
    arrive(engine, engine.scheduler.take_reserved()[0], prompt)
    engine.run()
    assert engine.seen["a"].tokens == expected(prompt, 9, ignore_eos=False)
    assert EOS not in engine.seen["a"].tokens or engine.seen["a"].last.finish is FinishReason.STOP


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
