"""How the end of a request is counted and told that its client did not wait for, and what of its tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from jdisagg.core.errors import Unavailable
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import EngineRequest, FinishReason, Output, SamplingParams
from jdisagg.core.timeline import DEADLINE_SLACK_S, Timeline


def ends(metrics: Metrics) -> dict[str, float]:
    samples = [sample for family in metrics.requests.finished.collect() for sample in family.samples if sample.value]
    return {sample.labels["reason"]: sample.value for sample in samples}


@pytest.mark.parametrize(
    ("left_s", "reason"),
    [
        (10.0, "abort"),
        (2 * DEADLINE_SLACK_S, "abort"),
        (DEADLINE_SLACK_S, "deadline"),
        (DEADLINE_SLACK_S / 2, "deadline"),
        (0.0, "deadline"),
        (-3.0, "deadline"),
    ],
)
def test_a_client_that_leaves_at_its_deadline_had_one(left_s: float, reason: str) -> None:
    metrics = Metrics()
    asked = EngineRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), deadline_s=100.0)
    timeline = Timeline(metrics, asked, 90.0)
    timeline.aborted(100.0 - left_s)
    assert ends(metrics) == {reason: 1.0}


def test_who_had_enough_at_the_deadline_was_answered() -> None:
    metrics = Metrics()
    asked = EngineRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), deadline_s=100.0)
    Timeline(metrics, asked, 90.0).stopped(100.0)
    assert ends(metrics) == {"stop": 1.0}


def test_a_prompt_counts_when_it_brings_its_first_token_once_for_all_its_choices() -> None:
    metrics = Metrics()
    for choice in range(3):
        asked = EngineRequest(
            request_id=f"r/{choice}", prompt_token_ids=(1, 2, 3, 4), sampling=SamplingParams(), deadline_s=100.0, choice=choice
        )
        timeline = Timeline(metrics, asked, 90.0)
        timeline.delivered(Output(request_id="r"), 91.0)
        assert metrics.requests.prompt_tokens._value.get() == (4 if choice else 0)
        timeline.delivered(Output(request_id="r", token_ids=(5,)), 92.0)
        timeline.delivered(Output(request_id="r", token_ids=(6, 7)), 93.0)
        assert metrics.requests.prompt_tokens._value.get() == 4


def test_a_stall_is_one_gap_though_many_tokens_end_it_at_once() -> None:
    metrics = Metrics()
    asked = EngineRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), deadline_s=100.0)
    timeline = Timeline(metrics, asked, 90.0)
    timeline.delivered(Output(request_id="r", token_ids=(5,)), 91.0)
    timeline.delivered(Output(request_id="r", token_ids=(6,) * 64), 93.0)
    gaps = {
        sample.labels.get("le", sample.name): sample.value
        for sample in next(iter(metrics.requests.itl_seconds.collect())).samples
    }
    assert gaps["1.0"] == 63
    assert gaps["2.5"] == gaps["jdisagg_inter_token_latency_seconds_count"] == 64
    assert gaps["jdisagg_inter_token_latency_seconds_sum"] == 2.0


def test_the_first_token_is_waited_for_since_the_request_entered_the_process() -> None:
    """Long before an engine hears of it, where texts, grammars or the first worker were waited for."""
    metrics = Metrics()
    asked = EngineRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), deadline_s=100.0, arrived_s=84.0)
    Timeline(metrics, asked, 90.0).delivered(Output(request_id="r", token_ids=(5,)), 91.0)
    assert metrics.requests.ttft_seconds._sum.get() == 7.0


FAILED = Output(request_id="r", finish=FinishReason.ERROR, error=Unavailable("nobody is left"))


@pytest.mark.parametrize(
    ("end", "reason", "said"),
    [
        (lambda timeline: timeline.delivered(FAILED, 91.0), "unavailable", "Unavailable: nobody is left"),
        (lambda timeline: timeline.aborted(91.0), "abort", "abort"),
        (lambda timeline: timeline.aborted(100.0), "deadline", "its client left at the deadline"),
        (lambda timeline: timeline.stopped(91.0), "stop", "stop string"),
    ],
)
def test_an_end_is_counted_by_its_reason_and_the_log_says_what_it_was(
    end: Callable[[Timeline], None], reason: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    asked = EngineRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), deadline_s=100.0)
    with caplog.at_level(logging.INFO, "jdisagg.core.record"):
        end(Timeline(metrics, asked, 90.0, slow_s=0.0))
    (line,) = caplog.messages
    assert line.startswith(f"request r: {said}, 0 tokens in ")
    assert ends(metrics) == {reason: 1.0}
