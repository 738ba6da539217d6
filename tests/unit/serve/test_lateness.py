"""How late an event loop is, on /metrics of its process."""

from __future__ import annotations

import asyncio
import time

import pytest

from jdisagg.core.metrics import Metrics
from jdisagg.serve import lateness
from jdisagg.serve.lateness import MOST_MISSED, observe_lateness, waits_s


def seen(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"jdisagg_event_loop_late_seconds_{name}", labels) or 0.0


@pytest.mark.parametrize("engine", [False, True])
def test_a_loop_that_is_held_up_is_seen_to_be_late_by_no_more_than_that(engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lateness, "LOOK_S", 0.01)

    async def body() -> Metrics:
        metrics = Metrics(engine=engine)
        watching = asyncio.create_task(observe_lateness(metrics))
        while seen(metrics, "count") < 3:
            await asyncio.sleep(0.01)
        time.sleep(0.3)  # this is what holds it up
        while not seen(metrics, "count") - seen(metrics, "bucket", le="0.25"):
            await asyncio.sleep(0.01)
        watching.cancel()
        return metrics

    began_s = time.monotonic()
    metrics = asyncio.run(body())
    assert seen(metrics, "sum") > 0.25
    assert seen(metrics, "count") <= (time.monotonic() - began_s) / 0.01 + 1, "no more looks than were due"
    assert seen(metrics, "count") - seen(metrics, "bucket", le="0.1") >= 19, "of one stall, each look that was due"
    assert seen(metrics, "bucket", le="0.1") >= 1, "before, it was not late"


@pytest.mark.parametrize(
    ("late_s", "waits"),
    [(-0.01, [0.0]), (0.0, [0.0]), (0.03, [0.03]), (0.13, [0.13, 0.03]), (0.45, [0.45, 0.35, 0.25, 0.15, 0.05])],
)
def test_what_is_due_in_a_stall_waits_until_its_end(late_s: float, waits: list[float]) -> None:
    assert list(waits_s(late_s)) == pytest.approx(waits)


def test_a_process_that_stood_still_for_hours_does_not_count_for_as_long() -> None:
    assert len(list(waits_s(7200.0))) == MOST_MISSED
