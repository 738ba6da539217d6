"""What a request's client gets, field by field: tokens, refusals, ends, and answers of a peer passed on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.errors import ConfigError, HandoffLost, InvalidRequest, NumericalError, Overloaded, Unavailable
from jdisagg.core.requests import FinishReason, Output, Provenance, Role, TokenLogprob
from jdisagg.sched.plan import Sampled, StepResult
from jdisagg.sched.scheduler import Scheduler
from tests.unit.sched.engine_fake import EOS, FakeEngine, expected, next_token, request

PROMPT = tuple(range(1, 11))
FIRST = next_token(PROMPT)


def cached_engine() -> FakeEngine:
    """A unified worker that has the first two pages of PROMPT in its prefix cache."""
    engine = FakeEngine(delay=0)
    engine.add(request("warm", PROMPT, 1))
    engine.run()
    return engine


def test_every_output_carries_attempt_and_cached_tokens() -> None:
    engine = cached_engine()
    engine.add(replace(request("a", PROMPT, 2, logprobs=0), attempt=4))
    engine.run()
    tokens = expected(PROMPT, 2)
    assert engine.seen["a"].outputs == [
        Output(
            request_id="a",
            attempt=4,
            token_ids=(tokens[0],),
            logprobs=(TokenLogprob(tokens[0], -0.5),),
            cached_tokens=8,
        ),
        Output(
            request_id="a",
            attempt=4,
            token_ids=(tokens[1],),
            logprobs=(TokenLogprob(tokens[1], -0.5),),
            finish=FinishReason.LENGTH,
            cached_tokens=8,
        ),
    ]


@pytest.mark.parametrize(("is_admitted", "cached_tokens"), [(False, 0), (True, 8)])
def test_a_failure_carries_its_error_attempt_and_what_was_cached(is_admitted: bool, cached_tokens: int) -> None:
    engine = cached_engine()
    engine.add(replace(request("a", PROMPT, 5), attempt=2))
    if is_admitted:
        engine.step()
    error = HandoffLost("gone")
    assert engine.scheduler.fail("a", error) == Output(
        request_id="a", attempt=2, finish=FinishReason.ERROR, error=error, cached_tokens=cached_tokens
    )
    assert engine.scheduler.fail("a", error) is None
    engine.run()


def test_a_row_without_usable_logits_names_request_step_and_layer() -> None:
    engine = FakeEngine(delay=0)
    engine.add(request("a", PROMPT, 5))
    engine.tick()
    engine.device.bad.add(0)
    engine.tick()
    error = engine.seen["a"].last.error
    assert isinstance(error, NumericalError)
    assert error.message == "request a: step 1 produced no usable logits (NaN in layer 1); other requests go on"


def test_a_request_for_its_prompt_alone_needs_no_logits_behind_it() -> None:
    engine = FakeEngine(delay=0)
    engine.add(request("a", PROMPT, 0, prompt_logprobs=0))
    engine.device.bad.add(0)
    engine.tick()
    (output,) = engine.seen["a"].outputs
    assert (output.finish, output.error) == (FinishReason.LENGTH, None)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPT)


def test_what_was_told_of_a_prompt_is_kept_no_longer() -> None:
    """With many alternatives of a long prompt it is a gigabyte."""
    engine = FakeEngine(delay=0)
    engine.add(request("a", PROMPT, 9, prompt_logprobs=0))
    engine.tick()
    (output,) = engine.seen["a"].outputs
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert engine.scheduler.table.live["a"].told.prompt_logprobs == []
    engine.run()
    assert len(engine.seen["a"].tokens) == 9


def test_the_deadline_counts_from_its_very_moment_and_the_message_says_how_far_it_came() -> None:
    engine = FakeEngine(delay=0)
    engine.add(request("a", PROMPT, 5, deadline_s=3.0), request("b", (1, 2), 5, deadline_s=9.0))
    engine.tick()
    assert engine.scheduler.expire(2.999) == []
    (output,) = engine.scheduler.expire(3.0)
    assert output.error is not None
    assert output.error.message == ("request a passed its deadline while running, after 1 of 5 tokens; allow more time")
    assert engine.scheduler.expire(8.0) == []
    assert [o.request_id for o in engine.scheduler.expire(9.0)] == ["b"]
    assert engine.scheduler.expire(1e12) == []
    engine.run()


def remote(engine: FakeEngine, first: Output) -> Output:
    """A decode worker's output for a peer's first token of PROMPT."""
    engine.add(replace(request("a", PROMPT, 4), attempt=3), remote=True)
    engine.step()
    return engine.scheduler.remote_first_token("a", first)


ANSWER = Output(
    request_id="theirs",
    attempt=1,
    token_ids=(FIRST,),
    logprobs=(TokenLogprob(FIRST, -0.25),),
    prompt_logprobs=(None, TokenLogprob(2, -1.0)),
    cached_tokens=6,
    provenance=Provenance(prefill_worker="pid 7"),
)


def test_a_peers_first_token_is_passed_on_whole_under_this_workers_attempt() -> None:
    engine = FakeEngine(Role.DECODE)
    assert remote(engine, ANSWER) == replace(ANSWER, request_id="a", attempt=3)
    # What was sent never changes: another peer's first token is empty, and so is what belongs to it.
    again = replace(ANSWER, token_ids=(5,), cached_tokens=9)
    assert engine.scheduler.remote_first_token("a", again) == Output(
        request_id="a", attempt=3, cached_tokens=6, provenance=ANSWER.provenance
    )


def test_a_peers_verdict_ends_the_request_with_its_stop_id() -> None:
    engine = FakeEngine(Role.DECODE)
    end = replace(ANSWER, finish=FinishReason.STOP, stop_token_id=FIRST)
    assert remote(engine, end) == replace(end, request_id="a", attempt=3)
    assert engine.scheduler.counts() == dict.fromkeys(engine.scheduler.counts(), 0)


def test_prompt_logprobs_come_with_an_end_that_has_no_token() -> None:
    engine = FakeEngine(Role.DECODE)
    error = HandoffLost("gone")
    only_prompt = replace(ANSWER, token_ids=(), logprobs=None, finish=FinishReason.ERROR, error=error, cached_tokens=0)
    assert remote(engine, only_prompt) == replace(only_prompt, request_id="a", attempt=3)


@pytest.mark.parametrize(("told", "cached"), [(6, 6), (99, 10)])
def test_cached_tokens_are_those_of_the_prompt_at_most(told: int, cached: int) -> None:
    assert remote(FakeEngine(Role.DECODE), replace(ANSWER, cached_tokens=told)).cached_tokens == cached


@pytest.mark.parametrize(
    ("computed", "found_there", "cached"),
    [(0, 0, 8), (1, 0, 8), (4, 0, 6), (4, 5, 6), (10, 0, 0), (10, 3, 3), (99, 2, 2)],
)
def test_what_a_peer_computed_was_not_cached_though_it_is_here(computed: int, found_there: int, cached: int) -> None:
    engine = FakeEngine(Role.DECODE)
    prompt = tuple(range(1, 11))
    engine.add(request("before", prompt, 1))
    engine.run()
    engine.add(request("a", prompt, 5), remote=True)
    assert engine.scheduler.held_tokens("a") == 8
    first = replace(ANSWER, cached_tokens=found_there, provenance=Provenance(prefilled_tokens=computed))
    assert engine.scheduler.remote_first_token("a", first).cached_tokens == cached


def test_tokens_behind_the_first_stop_are_dropped_with_their_logprobs() -> None:
    engine = FakeEngine(num_scheduler_steps=4, delay=0)
    engine.add(request("a", (1, 2), 9, ignore_eos=False, logprobs=0))
    engine.tick()
    plan = engine.scheduler.schedule(0.0)
    assert plan.num_steps == 4
    tokens = (5, EOS, 7, 8)
    answer = Sampled(slot=0, token_ids=tokens, logprobs=tuple(TokenLogprob(t, -1.0) for t in tokens))
    (output,) = engine.scheduler.commit(StepResult(step_id=plan.step_id, sampled=(answer,)))
    assert output == Output(
        request_id="a",
        token_ids=(5, EOS),
        logprobs=(TokenLogprob(5, -1.0), TokenLogprob(EOS, -1.0)),
        finish=FinishReason.STOP,
        stop_token_id=EOS,
    )


@pytest.mark.parametrize(
    ("generated", "finish", "stop_token_id"), [((9, EOS), FinishReason.STOP, EOS), ((9, 8, 7), FinishReason.LENGTH, None)]
)
def test_a_resumed_request_that_is_over_gets_its_end_once_and_nothing_when_cancelled(
    generated: tuple[int, ...], finish: FinishReason, stop_token_id: int | None
) -> None:
    engine = FakeEngine()
    names = ("told", "cancelled")
    engine.add(*(replace(request(n, (1,), 3, ignore_eos=False, generated=generated), attempt=6) for n in names))
    assert not engine.scheduler.is_idle()
    engine.scheduler.cancel("cancelled")
    assert engine.scheduler.expire(0.0) == [Output(request_id="told", attempt=6, finish=finish, stop_token_id=stop_token_id)]
    assert engine.scheduler.expire(0.0) == []
    assert engine.scheduler.is_idle()


def test_refusals_of_add_say_why_and_what_to_do() -> None:
    engine = FakeEngine(max_num_seqs=1, max_queue_len=1)
    engine.add(request("a", (1,)), request("waiting", (1,)))
    with pytest.raises(InvalidRequest) as live:
        engine.add(request("a", (1,)))
    assert (live.value.field, live.value.message) == ("request_id", "request id 'a' is live already; use a new one")
    with pytest.raises(Overloaded) as full:
        engine.add(request("b", (1,)))
    assert full.value.message == "1 requests are waiting, max_queue_len is 1; retry in 1.0 s or add a worker"
    engine.scheduler.drain()
    with pytest.raises(Unavailable) as draining:
        engine.add(request("c", (1,)))
    assert draining.value.message == "this worker is draining; send the request to another one"
    engine.run()


def test_a_scheduler_counts_lookahead_and_the_models_stop_ids() -> None:
    sizes = {"max_model_len": 64, "page_size": 4, "num_pages": 40, "eos_token_ids": (EOS,), "num_lookahead": 1}
    with pytest.raises(ConfigError, match="4 sequences decode 8 tokens a step"):
        Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=7), role=Role.UNIFIED, **sizes)
    scheduler = Scheduler(SchedulerConfig(), role=Role.UNIFIED, **sizes)
    with pytest.raises(InvalidRequest, match="65 with the model's own"):
        scheduler.add(request("a", (1,), 2, stop_token_ids=tuple(range(1, 65))), 0.0)
    scheduler.add(request("a", (1, 2, 3, 4), 2, ignore_eos=False, stop_token_ids=(EOS + 1,)), 0.0)
    plan = scheduler.schedule(0.0)
    assert (plan.num_lookahead, plan.admit[0].stop_ids) == (1, (EOS, EOS + 1))


def test_prefixes_are_cached_and_retracted_sequences_computed_here_unless_told_otherwise() -> None:
    sizes = {"max_model_len": 64, "page_size": 4, "num_pages": 7, "eos_token_ids": ()}
    scheduler = Scheduler(SchedulerConfig(reserved_decode_tokens=0, max_num_seqs=2), role=Role.DECODE, **sizes)
    scheduler.add(request("a", (1,) * 8, 12), 0.0)
    scheduler.add(request("b", (2,) * 8, 12), 0.0)
    while not scheduler.stats.retractions:
        assert not scheduler.is_idle(), "nobody was retracted"
        plan = scheduler.schedule(0.0)
        slots = {*plan.decode, *(c.slot for c in plan.prefill)}
        scheduler.commit(StepResult(step_id=plan.step_id, sampled=tuple(Sampled(slot=s, token_ids=(3,)) for s in slots)))
    assert scheduler.take_retracted() == []
    assert scheduler.counts()["waiting"] == 1
    assert scheduler.held_tokens("b") == 8  # what it computed is found again


def test_a_ready_peer_is_one_unless_said_otherwise() -> None:
    sizes = {"max_model_len": 64, "page_size": 4, "num_pages": 20, "eos_token_ids": ()}
    scheduler = Scheduler(SchedulerConfig(), role=Role.DECODE, **sizes)
    scheduler.add(request("a", (1, 2), 3), 0.0, remote=True)
    scheduler.peer_ready("a")
    scheduler.peer_ready("unknown")
    scheduler.schedule(0.0)
    assert [r.request_id for r in scheduler.take_reserved()] == ["a"]
    scheduler.add(request("b", (1, 2), 3), 0.0, remote=True)
    scheduler.peer_ready("b", False)
    scheduler.schedule(0.0)
    assert scheduler.take_reserved() == []


def test_a_page_is_found_as_soon_as_the_step_that_filled_it_has_committed() -> None:
    engine = FakeEngine(delay=0)
    engine.add(replace(request("a", (1, 2), 14), attempt=2))
    for _ in range(14):
        engine.step()
        (shown,) = engine.scheduler.snapshot()["sequences"]
        num_computed = shown["scheduled_tokens"]
        engine.commit_one()
        assert engine.scheduler.snapshot()["prefix_cache"]["pages"] == num_computed // 4
    assert engine.seen["a"].tokens == expected((1, 2), 14)
    assert {output.attempt for output in engine.seen["a"].outputs} == {2}
    engine.run()


def test_every_token_has_its_logprob_when_asked_for_and_none_otherwise() -> None:
    engine = FakeEngine()
    engine.add(request("scored", (1, 2), 9, logprobs=0), request("plain", (1, 2), 9))
    engine.run()
    scored = [logprob.token_id for output in engine.seen["scored"].outputs for logprob in output.logprobs or ()]
    assert scored == engine.seen["scored"].tokens == expected((1, 2), 9)
    assert all(output.logprobs is None for output in engine.seen["plain"].outputs)


def test_logprobs_nobody_asked_for_go_no_further() -> None:
    engine = FakeEngine()
    engine.add(request("a", (1, 2), 3))
    for step_id in range(3):
        engine.scheduler.schedule(0.0)
        answer = Sampled(slot=0, token_ids=(5,), logprobs=(TokenLogprob(5, -1.0),))
        (output,) = engine.scheduler.commit(StepResult(step_id=step_id, sampled=(answer,)))
        assert (output.token_ids, output.logprobs) == ((5,), None)
