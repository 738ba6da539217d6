"""One engine for both phases: tokens, order, budgets, sharing, ends."""

from __future__ import annotations

import pytest

from jdisagg.core.errors import NumericalError
from jdisagg.core.requests import FinishReason
from tests.unit.sched.engine_fake import EOS, FakeEngine, expected, next_token, request

LONG = tuple(range(1, 24))  # 23 tokens: six pages of 4, the last not full


@pytest.mark.covers("V01", "H05", "D24")
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_every_request_gets_its_tokens_whatever_is_mixed_in_a_step(delay: int) -> None:
    engine = FakeEngine(delay=delay)
    prompts = {f"r{i}": LONG[i : 10 + 2 * i] for i in range(7)}
    engine.add(*(request(name, prompt, 5 + len(name)) for name, prompt in prompts.items()))
    engine.run()
    for name, prompt in prompts.items():
        assert engine.seen[name].tokens == expected(prompt, 5 + len(name))
        assert engine.seen[name].last.finish is FinishReason.LENGTH
    assert any(p.prefill and p.decode for p in engine.plans)


@pytest.mark.covers("D25", "V11", "H06")
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8])
def test_overlap_gives_the_tokens_of_the_plain_loop_without_a_wasted_row(max_tokens: int) -> None:
    engines = [FakeEngine(delay=delay) for delay in (0, 1)]
    for engine in engines:
        engine.add(request("a", LONG, max_tokens), request("b", LONG[:5], max_tokens))
        engine.run()
        rows = sum(len(p.decode) for p in engine.plans)
        assert rows == 2 * (max_tokens - 1)
    assert [engines[0].seen[r].tokens for r in "ab"] == [engines[1].seen[r].tokens for r in "ab"]


@pytest.mark.covers("D20")
def test_max_tokens_1_is_one_token_and_no_decode_step() -> None:
    engine = FakeEngine()
    engine.add(request("a", (3, 4), 1))
    engine.run()
    assert engine.seen["a"].tokens == [7]
    assert not any(p.decode for p in engine.plans)


def test_max_tokens_0_computes_the_prompt_and_gives_no_token() -> None:
    engine = FakeEngine()
    engine.add(request("a", (3, 4, 5), 0, prompt_logprobs=0))
    engine.run()
    only = engine.seen["a"].last
    assert (only.token_ids, only.finish) == ((), FinishReason.LENGTH)
    assert only.prompt_logprobs is not None
    assert [p.token_id if p else None for p in only.prompt_logprobs] == [None, 4, 5]


@pytest.mark.covers("V32")
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_eos_ends_the_stream_and_later_tokens_in_flight_are_dropped(delay: int) -> None:
    prompt = (30, 1)  # 31 % 31 = 0 = EOS at once
    engine = FakeEngine(delay=delay)
    engine.add(request("a", prompt, 9, ignore_eos=False), request("b", LONG, 9))
    engine.run()
    assert engine.seen["a"].tokens == [EOS]
    assert (engine.seen["a"].last.finish, engine.seen["a"].last.stop_token_id) == (FinishReason.STOP, EOS)
    assert engine.seen["b"].tokens == expected(LONG, 9)


def test_min_tokens_and_ignore_eos_hold_eos_back() -> None:
    prompt = (30, 1)  # generates 0, 0, 0, ...
    engine = FakeEngine()
    engine.add(
        request("min", prompt, 9, ignore_eos=False, min_tokens=3),
        request("ignore", prompt, 5),
        request("stop-id", (1, 2), 9, stop_token_ids=(6,)),  # 3, 6
    )
    engine.run()
    assert engine.seen["min"].tokens == [0, 0, 0]
    assert engine.seen["ignore"].tokens == [0] * 5
    assert engine.seen["stop-id"].tokens == [3, 6]
    assert engine.seen["stop-id"].last.stop_token_id == 6


@pytest.mark.covers("H02", "V04", "D16")
def test_decodes_come_first_then_prefills_then_arrivals_in_order() -> None:
    engine = FakeEngine(max_num_seqs=2, max_num_batched_tokens=8)
    engine.add(request("a", LONG[:4], 6), request("b", LONG, 3), request("c", LONG[:3], 3))
    admitted: list[str] = []
    for _ in range(20):
        plan = engine.tick()
        admitted += [a.request_id for a in plan.admit]
        assert engine.scheduler.counts()["running"] <= 2
        if plan.decode and plan.prefill:
            assert plan.num_tokens <= 8
    engine.run()
    assert admitted == ["a", "b", "c"]
    chunks = [(c.start, len(c.token_ids)) for p in engine.plans for c in p.prefill if c.request_id == "b"]
    assert chunks[0] == (0, 4)  # what "a" left of the first budget
    assert chunks[1] == (4, 7)  # one row went to decode "a"
    assert sum(length for _, length in chunks) == len(LONG)


@pytest.mark.covers("V02", "V05")
def test_a_long_prompt_takes_at_most_its_threshold_of_any_step() -> None:
    engine = FakeEngine(long_prefill_token_threshold=3, max_num_batched_tokens=8)
    engine.add(request("long", LONG, 2), request("short", LONG[:6], 2))
    engine.run()
    for plan in engine.plans:
        assert all(len(c.token_ids) <= 3 for c in plan.prefill)
        assert plan.num_tokens <= 8
    assert engine.seen["long"].tokens == expected(LONG, 2)


@pytest.mark.covers("V33")
def test_nothing_comes_out_before_the_whole_prompt_is_computed() -> None:
    engine = FakeEngine(max_num_batched_tokens=5)
    engine.add(request("a", LONG, 2))
    for _ in range(4):
        engine.tick()
        assert engine.seen == {}
    engine.run()
    assert engine.seen["a"].tokens == expected(LONG, 2)


@pytest.mark.covers("V28", "H07", "V19")
def test_the_same_prompt_again_computes_only_what_was_not_kept_and_at_least_one_token() -> None:
    engine = FakeEngine()
    exact_pages = LONG[:12]
    engine.add(request("first", exact_pages, 2))
    engine.run()
    computed = engine.device.num_forward_tokens
    engine.add(request("second", exact_pages, 2))
    engine.run()
    assert engine.seen["second"].tokens == expected(exact_pages, 2)
    assert engine.seen["second"].last.cached_tokens == 8  # not 12: the last token is computed for its logits
    assert engine.device.num_forward_tokens - computed == 4 + 1
    assert engine.seen["first"].last.cached_tokens == 0


@pytest.mark.covers("H08", "V18")
def test_a_page_is_shared_only_after_the_step_that_wrote_it_committed() -> None:
    engine = FakeEngine(delay=2, max_num_batched_tokens=32)
    engine.add(request("a", LONG[:12], 3))
    engine.step()
    engine.add(request("b", LONG[:12], 3))
    engine.step()
    chunk = engine.plans[-1].prefill[0]
    assert (chunk.request_id, chunk.start) == ("b", 0)
    engine.run()
    assert engine.seen["a"].tokens == engine.seen["b"].tokens == expected(LONG[:12], 3)


def test_cache_salt_and_unequal_prefixes_share_nothing() -> None:
    engine = FakeEngine()
    engine.add(request("a", LONG[:9], 1, salt="one"))
    engine.run()
    engine.add(request("b", LONG[:9], 1, salt="two"), request("c", (9, *LONG[1:9]), 1, salt="one"))
    engine.run()
    assert engine.seen["b"].last.cached_tokens == engine.seen["c"].last.cached_tokens == 0
    assert engine.seen["c"].tokens == expected((9, *LONG[1:9]), 1)


def test_generated_tokens_are_shared_with_the_next_turn() -> None:
    engine = FakeEngine()
    engine.add(request("turn-1", LONG[:6], 8))
    engine.run()
    history = LONG[:6] + tuple(engine.seen["turn-1"].tokens)
    engine.add(request("turn-2", (*history, 5), 2))
    engine.run()
    assert engine.seen["turn-2"].last.cached_tokens == 12  # 13 tokens have KV: three full pages
    assert engine.seen["turn-2"].tokens == expected((*history, 5), 2)


@pytest.mark.covers("H09", "X28")
def test_choices_of_one_prompt_share_its_pages_once_computed() -> None:
    engine = FakeEngine(num_pages=20)
    engine.add(request("c/0", LONG[:16], 2))
    engine.run()
    engine.add(*(request(f"c/{i}", LONG[:16], 2) for i in (1, 2, 3)), request("one/0", (5,), 1), request("one/1", (5,), 1))
    engine.tick()
    assert engine.scheduler.num_pages - engine.scheduler.num_free_pages < 2 * 5
    engine.run()
    assert {tuple(engine.seen[f"c/{i}"].tokens) for i in range(4)} == {tuple(expected(LONG[:16], 2))}
    assert engine.seen["one/0"].tokens == engine.seen["one/1"].tokens == [5]


def test_a_resumed_request_goes_on_where_it_was_and_repeats_nothing() -> None:
    whole = expected(LONG, 9)
    engine = FakeEngine()
    engine.add(request("a", LONG, 9, generated=tuple(whole[:4]), prompt_logprobs=0))
    engine.run()
    assert engine.seen["a"].tokens == whole[4:]
    assert all(o.prompt_logprobs is None for o in engine.seen["a"].outputs)


@pytest.mark.parametrize(
    ("generated", "finish"), [((3, 6, 12), FinishReason.LENGTH), ((3, EOS), FinishReason.STOP)], ids=["length", "eos"]
)
def test_a_resumed_request_that_is_complete_gets_only_its_end(generated: tuple[int, ...], finish: FinishReason) -> None:
    engine = FakeEngine()
    engine.add(request("a", (1, 2), 3, generated=generated, ignore_eos=False))
    assert not engine.scheduler.is_idle()
    engine.run()
    assert engine.plans == []
    assert (engine.seen["a"].tokens, engine.seen["a"].last.finish) == ([], finish)


def test_prompt_logprobs_cover_every_position_once_and_skip_the_cache() -> None:
    engine = FakeEngine(max_num_batched_tokens=5)
    engine.add(request("warm", LONG, 1))
    engine.run()
    engine.add(request("a", LONG, 3, prompt_logprobs=2))
    engine.run()
    first = engine.seen["a"].outputs[0].prompt_logprobs
    assert first is not None
    assert first[0] is None
    assert [p.token_id for p in first if p is not None] == list(LONG[1:])
    assert all(o.prompt_logprobs is None for o in engine.seen["a"].outputs[1:])
    assert engine.seen["a"].last.cached_tokens == 0
    assert {c.num_top for p in engine.plans for c in p.prefill if c.targets} == {2}


def test_logprobs_are_given_only_to_those_who_ask_one_per_token() -> None:
    engine = FakeEngine()
    engine.add(request("asks", LONG, 3, logprobs=0), request("does-not", LONG, 3))
    engine.run()
    for output in engine.seen["asks"].outputs:
        assert output.logprobs is not None
        assert [p.token_id for p in output.logprobs] == list(output.token_ids)
    assert all(o.logprobs is None for o in engine.seen["does-not"].outputs)


def test_nan_logits_fail_their_request_alone() -> None:
    engine = FakeEngine()
    engine.add(request("a", LONG[:5], 9), request("b", LONG[:6], 9))
    engine.tick()
    engine.tick()
    engine.device.bad.add(0)
    engine.run()
    error = engine.seen["a"].last.error
    assert error is not None
    assert error.grpc_status == "INTERNAL"
    assert "NaN in layer 1" in error.message
    assert engine.seen["b"].tokens == expected(LONG[:6], 9)


@pytest.mark.parametrize("bad", [1, 6, len(LONG) - 1])
def test_a_prompt_token_without_log_probability_fails_its_request_alone(bad: int) -> None:
    engine = FakeEngine(max_num_batched_tokens=10)
    engine.add(request("a", LONG, 9, prompt_logprobs=0), request("b", LONG[:6], 9))
    engine.device.unscored.add(bad)
    engine.run()
    (output,) = engine.seen["a"].outputs
    assert isinstance(output.error, NumericalError)
    assert output.error.message == (
        f"request a: infinity or NaN in the logits of prompt token {bad}, counted from 0; other requests go on"
    )
    assert engine.seen["b"].tokens == expected(LONG[:6], 9)


@pytest.mark.covers("H17")
def test_two_equal_histories_give_equal_plans() -> None:
    histories = []
    for _ in range(2):
        engine = FakeEngine(num_pages=12, max_num_batched_tokens=7)
        engine.add(*(request(f"r{i}", LONG[: 3 + i], 9) for i in range(5)))
        engine.run()
        histories.append(engine.plans)
    assert histories[0] == histories[1]


@pytest.mark.covers("V35")
def test_every_slot_is_evicted_once_for_every_admission() -> None:
    engine = FakeEngine(max_num_seqs=2)
    engine.add(*(request(f"r{i}", LONG[: 3 + i], 3) for i in range(5)))
    engine.run()
    assert sorted(s for p in engine.plans for s in p.evict) == sorted(a.slot for p in engine.plans for a in p.admit)
    assert next_token([1, 2]) == 3  # the model of these tests, by hand


@pytest.mark.covers("V38")
def test_counters_agree_with_what_the_device_did_and_counts_with_the_queues() -> None:
    engine = FakeEngine(max_num_seqs=2)
    engine.add(*(request(f"r{i}", LONG[: 9 + i], 3) for i in range(4)))
    while not engine.scheduler.is_idle():
        engine.tick()
        counts = engine.scheduler.counts()
        assert sum(counts.values()) == len(engine.scheduler.snapshot()["sequences"])
        stats = engine.scheduler.stats
        assert stats.prefill_tokens + stats.decode_tokens == engine.device.num_forward_tokens
    stats = engine.scheduler.stats
    assert stats.prefix_query_tokens == 9 + 10 + 11 + 12
    assert stats.prefill_tokens + stats.prefix_hit_tokens == stats.prefix_query_tokens
    assert stats.decode_tokens == 4 * 2
