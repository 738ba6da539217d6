"""What a worker says of a request is passed on whole, as one attempt's."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest

from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import FinishReason, Output, Provenance, TokenLogprob
from jdisagg.router.flight import Flight
from tests.unit.wire.rig import member, request

SCORED = (TokenLogprob(7, -0.5),)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"token_ids": (7,)},
        {"token_ids": (7, 8), "logprobs": SCORED * 2},
        {"token_ids": (7,), "cached_tokens": 2},
        {"token_ids": (7,), "prompt_logprobs": (None, *SCORED, *SCORED)},
        {"token_ids": (7,), "provenance": Provenance(decode_worker="d", recoveries=("refetch",)), "cached_tokens": 1},
        {"token_ids": (7,), "finish": FinishReason.STOP, "stop_token_id": 7},
        {"error": InvalidRequest("no"), "finish": FinishReason.ERROR},
        {"error": InvalidRequest("no")},
    ],
    ids=str,
)
def test_an_output_is_passed_on_whole_under_the_clients_attempt_and_its_workers_fingerprint(said: dict[str, Any]) -> None:
    flight = Flight(request("r", prompt=(1, 2, 3)))
    flight.attempt, flight.card = 4, member(fingerprint="weights").card
    output = Output(request_id="r", attempt=4, **said)
    assert flight.accept(output) == replace(output, attempt=0, fingerprint="weights")
    assert flight.num_delivered == len(output.token_ids)
    assert flight.finished is (output.finish is not None)


def test_no_more_tokens_count_as_cached_than_the_prompt_has() -> None:
    for finish in (None, FinishReason.LENGTH):
        flight = Flight(request("r", prompt=(1, 2, 3)))
        assert flight.accept(Output(request_id="r", token_ids=(7,), cached_tokens=9, finish=finish)).cached_tokens == 3


def test_what_a_replay_finds_of_its_own_prompt_counts_as_cached_no_more_than_before() -> None:
    for told in (0, 2):
        flight = Flight(request("r", prompt=(1, 2, 3)))
        assert flight.accept(Output(request_id="r", token_ids=(7,), cached_tokens=told)).cached_tokens == told
        for finish in (None, FinishReason.LENGTH):
            flight.replay()
            assert flight.accept(Output(request_id="r", token_ids=(7,), cached_tokens=3, finish=finish)).cached_tokens == told


def test_a_replay_of_what_has_not_begun_tells_what_it_found() -> None:
    flight = Flight(request("r", prompt=(1, 2, 3)))
    flight.replay()
    assert flight.accept(Output(request_id="r", token_ids=(7,), cached_tokens=2)).cached_tokens == 2


def test_the_garbage_collector_goes_through_nothing_that_was_delivered() -> None:
    """A router has the tokens of all its streams."""
    flight = Flight(request("r", prompt=(1, 2, 3)))
    for token_id in (7, 2**31 - 1):
        flight.accept(Output(request_id="r", token_ids=(token_id,)))
    assert flight.attempt_request((), 99, 1).generated_token_ids == (7, 2**31 - 1)
    assert len(gc.get_referents(flight._delivered)) <= 1, "its type"
