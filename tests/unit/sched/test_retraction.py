"""Sequences that lose their peer or their pages: what is computed here, what is fetched anew, and in whose place."""

from __future__ import annotations

import pytest

from jdisagg.core.errors import HandoffLost
from jdisagg.core.requests import FinishReason, Role
from tests.unit.sched.engine_fake import FakeEngine, expected, request
from tests.unit.sched.peer_fake import PROMPT, arrive, first_of, status_of


@pytest.mark.covers("V25")
@pytest.mark.parametrize("stage", ["prealloc", "transfer", "transfer-with-token", "ready"])
def test_falling_back_keeps_the_place_in_the_queue_and_what_was_sent(stage: str) -> None:
    engine = FakeEngine(Role.DECODE, max_num_seqs=1)
    engine.add(request("a", PROMPT, 5), remote=True)
    if stage != "prealloc":
        engine.tick()
        (reserved,) = engine.scheduler.take_reserved()
        if stage == "transfer-with-token":
            engine.collect([engine.scheduler.remote_first_token("a", first_of(PROMPT, "a"))])
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
    held up, and computes again what had not come alone."""
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
    assert next(c.start for c in chunks if c.request_id == "b") == kept
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


@pytest.mark.covers("D18")
@pytest.mark.parametrize("num_found", [0, 8])
@pytest.mark.parametrize("role", [Role.UNIFIED, Role.DECODE])
def test_what_a_retracted_sequence_finds_of_itself_was_not_cached_when_it_came(role: Role, num_found: int) -> None:
    first, second = tuple(range(1, 17)), tuple(range(3, 19))
    engine = FakeEngine(role, num_pages=12, max_num_seqs=2)
    if num_found:
        engine.add(request("earlier", second[:num_found], 1))
        engine.run()
    engine.add(request("a", first, 16), request("b", second, 16))
    while not engine.scheduler.stats.refound_tokens:
        engine.tick()
    engine.run()
    b = engine.seen["b"]
    assert b.tokens == expected(second, 16)
    assert {output.cached_tokens for output in b.outputs} <= {0, num_found}
    assert b.outputs[0].cached_tokens == b.last.cached_tokens == num_found


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
