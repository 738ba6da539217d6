"""How late an event loop is, on /metrics of its process."""

from __future__ import annotations

import asyncio
import time

import pytest

from jdisagg.core.metrics import Metrics
from jdisagg.serve import lateness
from jdisagg.serve.lateness import observe_lateness


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
    assert 0.25 < seen(metrics, "sum") < time.monotonic() - began_s
    assert seen(metrics, "bucket", le="0.1") >= 1, "before, it was not late"
