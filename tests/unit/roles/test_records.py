"""Events of a request: what is shown of them live, what is logged when it took long, and how many are kept."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from jdisagg.core.metrics import Metrics
from jdisagg.core.record import MAX_EVENTS, Event, RequestRecord
from jdisagg.core.requests import FinishReason
from tests.unit.roles.measured import PHASES, Unified
from tests.unit.roles.world import PROMPT, World
from tests.unit.sched.engine_fake import expected, request

pytestmark = pytest.mark.usefixtures("no_sleep")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.covers("V39")
def test_events_of_a_preempted_request_are_shown_live_and_logged_when_it_took_long(caplog: pytest.LogCaptureFixture) -> None:
    unified = Unified(num_pages=8, slow_request_s=0.15, reserved_decode_tokens=0)
    for index in range(3):
        unified.submit(replace(request(f"r{index}", (index + 1,) * 4, 12), traceparent=TRACE if index == 2 else ""))
    unified.submit(request("quick", (9,), 1))
    live: dict[str, Any] = {}
    with caplog.at_level(logging.INFO, "jdisagg.core.record"):
        for _ in range(100):
            unified.tick()
            live |= unified.requests()
    assert unified.engine.metrics.engine.preemptions._value.get() >= 1
    assert unified.requests() == {}
    shown = live["r2"]
    names = [event["event"] for event in shown["events"]]
    assert names[:4] == ["queued", "scheduled", "preempted", "resumed"]
    times = [event["at_s"] for event in shown["events"]]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert shown["traceparent"] == TRACE
    lines = {record.args[0]: record.getMessage() for record in caplog.records if isinstance(record.args, tuple)}
    assert "quick" not in lines
    assert f"request r2 (traceparent {TRACE}): length, 12 tokens in 0." in lines["r2"]
    assert "queued +0.000, scheduled +0.000, preempted +" in lines["r2"]
    assert "finished +0." in lines["r2"]
    assert [output.finish for output in unified.outputs if output.finish] == [FinishReason.LENGTH] * 4


@pytest.mark.covers("V39")
def test_the_trace_context_goes_from_the_decode_worker_to_its_prefill_worker(caplog: pytest.LogCaptureFixture) -> None:
    world = World(local_prefill=False, slow_request_s=0.0)
    with caplog.at_level(logging.INFO, "jdisagg.core.record"):
        world.submit(replace(request("a", PROMPT, 6), traceparent=TRACE))
        world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)
    prefill, decode = (record.getMessage() for record in caplog.records)
    assert f"(traceparent {TRACE}): hand-off over, 1 tokens in" in prefill
    assert f"request a (traceparent {TRACE}): length, 6 tokens in" in decode
    assert "queued +0.000, scheduled +" in prefill
    assert "transfer" in prefill
    assert "decode" not in prefill
    for phase in PHASES:
        assert f"{phase} " in decode


def test_of_endless_events_the_first_and_the_latest_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jdisagg.core.record")
    record = RequestRecord(Metrics(), request("a", (1,), 1), 0.0, slow_s=0.0)
    for step in range(200):
        record.scheduled(float(step))
        record.preempted(step + 0.5)
    shown = record.snapshot()
    assert len(shown["events"]) == MAX_EVENTS
    assert [event["event"] for event in shown["events"][:2]] == [Event.QUEUED.value, Event.SCHEDULED.value]
    assert shown["events"][-1] == {"event": "preempted", "at_s": 199.5}
    assert shown["events_left_out"] == 401 - MAX_EVENTS
    record.ended("abort", 0, 200.0)
    assert told(caplog).endswith(f"finished +200.000 ({402 - MAX_EVENTS} events left out)")


def told(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = caplog.messages
    caplog.clear()
    return line


def test_a_life_is_logged_with_its_phases_and_events(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jdisagg.core.record")
    record = RequestRecord(Metrics(), request("a", (1,), 2), 100.0, slow_s=6.5)
    record.scheduled(101.0)
    record.produced(103.0)
    record.ended("length", 2, 107.0)
    phases, events = "queue 1.000 s + prefill 2.000 s + decode 4.000 s", "queued +0.000, scheduled +1.000, finished +7.000"
    assert told(caplog) == f"request a: length, 2 tokens in 7.000 s = {phases}; {events}"


@pytest.mark.parametrize("has_token", [True, False])
def test_a_hand_off_that_ends_says_whether_its_first_token_was_there(has_token: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jdisagg.core.record")
    record = RequestRecord(Metrics(), request("a", (1,), 2), 100.0, slow_s=0.0)
    record.scheduled(101.0)
    if has_token:
        record.produced(103.0)
    record.handed_over(107.0)
    said = "hand-off over, 1 tokens" if has_token else "given up before its first token, 0 tokens"
    assert told(caplog).startswith(f"request a: {said} in 7.000 s = ")


def test_what_is_shown_of_a_short_life_is_to_the_microsecond_and_leaves_nothing_out() -> None:
    record = RequestRecord(Metrics(), request("a", (1,), 1), 0.0)
    record.scheduled(1 / 3)
    assert record.snapshot() == {
        "phase": "prefill",
        "events": [{"event": "queued", "at_s": 0.0}, {"event": "scheduled", "at_s": 0.333333}],
        "traceparent": "",
    }
