"""What each attempt of a request asks for, and what its client gets of all of them together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jdisagg.core.errors import HandoffLost
from jdisagg.core.requests import FinishReason, Output, Provenance, SamplingParams, TokenLogprob
from jdisagg.router.entry import Entry
from jdisagg.router.flight import Flight
from tests.unit.wire.rig import member, request, run_quiet

MEMBER = member(address="d:1", fingerprint="w", max_model_len=50, vocab_size=10)
SCORES = (None, TokenLogprob(2, -0.5), TokenLogprob(3, -0.5))


def flight(max_tokens: int = 8, **fields: Any) -> Flight:
    """Of three prompt tokens, on a worker of those weights."""
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=fields.pop("min_tokens", 0), prompt_logprobs=1)
    found = Flight(request("r", prompt=(1, 2, 3), sampling=sampling, **fields))
    found.entry, found.card = Entry(MEMBER, 0.0), MEMBER.card
    return found


def say(of: Flight, *token_ids: int, **fields: Any) -> Output:
    return of.accept(Output(request_id="r", attempt=of.attempt, token_ids=token_ids, **fields))


def test_the_next_attempt_goes_on_behind_all_that_was_delivered_by_all_before() -> None:
    one = flight(generated_token_ids=(4,), attempt=2)
    say(one, 5, 6)
    one.replay()
    say(one, 7)
    one.replay()
    asked = one.attempt_request(("p:1", "p:2"), 50, 3)
    assert (asked.attempt, asked.generated_token_ids) == (4, (4, 5, 6, 7))
    assert (asked.prefill_peers, asked.num_asked) == (("p:1", "p:2"), 3)
    assert (asked.prompt_token_ids, asked.sampling) == ((1, 2, 3), one.request.sampling)
    assert one.prefill_tokens == 3 + 4 + 1


def test_nothing_that_an_older_attempt_sent_is_left_for_the_client_of_the_next() -> None:
    async def body() -> None:
        one = flight()
        one.events.put(Output(request_id="r", token_ids=(5,)))
        one.replay()
        one.events.put(Output(request_id="r", attempt=1, token_ids=(6,)))
        event = await one.events.get()
        assert isinstance(event, Output)
        assert event.token_ids == (6,)

    run_quiet(asyncio.wait_for(body(), 10.0))


def test_the_scores_of_a_prompt_are_delivered_once_and_then_asked_for_no_more() -> None:
    one = flight()
    one.replay()
    assert one.attempt_request((), 50, 1).sampling.prompt_logprobs == 1
    assert say(one, 5, prompt_logprobs=SCORES).prompt_logprobs == SCORES
    one.replay()
    assert one.attempt_request((), 50, 1).sampling.prompt_logprobs is None
    assert say(one, 6, prompt_logprobs=SCORES).prompt_logprobs is None
    assert say(one, 7).prompt_logprobs is None


def test_who_has_got_nothing_may_be_answered_by_other_weights_and_nobody_else() -> None:
    one = flight()
    one.replay()
    assert one.is_untouched
    assert one.fingerprint is None
    for said in ({"token_ids": (5,)}, {"prompt_logprobs": SCORES}):
        one = flight()
        one.accept(Output(request_id="r", **said))
        one.replay()
        assert not one.is_untouched
        assert one.fingerprint == "w"


@pytest.mark.parametrize(
    ("token_ids", "is_odd"),
    [
        ((0,), False),
        ((9,), False),
        ((10,), True),
        ((-1,), True),
        ((1, 10), True),
        ((1,) * 3, False),
        ((1,) * 4, True),
        ((), False),
    ],
)
def test_tokens_beyond_the_vocabulary_or_beyond_what_was_asked_for_are_refused(
    token_ids: tuple[int, ...], is_odd: bool
) -> None:
    one = flight(generated_token_ids=(1, 2))
    say(one, 3, 4, 5)
    assert bool(one.objection(Output(request_id="r", token_ids=token_ids))) is is_odd


@pytest.mark.parametrize(("num_missing", "is_complete"), [(1, False), (0, True)])
def test_a_request_whose_worker_died_behind_its_last_token_is_complete(num_missing: int, is_complete: bool) -> None:
    one = flight(generated_token_ids=(1, 2), attempt=2)
    say(one, *[5] * (6 - num_missing))
    end = one.complete()
    assert (end is not None) is is_complete is one.finished
    if end is not None:
        assert (end.finish, end.error, end.token_ids, end.attempt, end.fingerprint) == (FinishReason.LENGTH, None, (), 2, "w")


def test_a_request_that_cannot_be_saved_ends_with_the_error() -> None:
    one = flight()
    end = one.failed(error := HandoffLost("every rung failed"))
    assert (end.finish, end.error, end.attempt) == (FinishReason.ERROR, error, 0)
    assert one.finished


def test_the_end_tells_of_every_recovery_in_the_order_they_were_taken_and_of_none_twice() -> None:
    one = flight()
    say(one, 5, provenance=Provenance(prefill_worker="p1", recoveries=("other_prefill",)))
    one.replay()
    say(one, 6, provenance=Provenance(prefill_worker="p2", recoveries=("refetch",)))
    end = say(one, 7, finish=FinishReason.LENGTH, provenance=Provenance(recoveries=("refetch", "reconnect")))
    assert end.provenance is not None
    assert end.provenance.recoveries == ("other_prefill", "replay", "refetch", "reconnect")


def test_the_end_of_a_replayed_request_tells_of_that_where_its_worker_says_nothing() -> None:
    one = flight()
    assert say(one, 5, finish=FinishReason.LENGTH).provenance is None
    one = flight()
    one.replay()
    assert say(one, 5).provenance is None
    assert say(one, 6, prompt_logprobs=SCORES).provenance is None
    assert say(one, 7, finish=FinishReason.LENGTH).provenance == Provenance(recoveries=("replay",))


def test_an_answer_of_no_stated_length_fits_where_one_more_token_does_or_as_many_as_it_must_have() -> None:
    one, bound = flight(40, fills_context=True, min_tokens=5), flight(40)
    assert (bound.least_tokens, bound.most_tokens) == (43, 43)
    assert (one.least_tokens, one.most_tokens) == (8, 43)
    say(one, 1, 2, 3, 4, 5)
    assert one.least_tokens == 3 + 5 + 1
    assert one.attempt_request((), 20, 1).sampling.max_tokens == 17
    assert one.attempt_request((), 60, 1).sampling.max_tokens == 40
    assert bound.attempt_request((), 20, 1).sampling.max_tokens == 40
