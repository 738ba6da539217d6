"""Gauges of a process with several engines (colocated): what they show adds up."""

from __future__ import annotations

from prometheus_client import Gauge


class GaugeShare:
    """One engine's part of a gauge. Owned by its engine thread."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._shown = 0

    def show(self, value: int) -> None:
        """Move the gauge by what has changed since the last call."""
        if (change := value - self._shown) != 0:
            self._gauge.inc(change)
            self._shown = value
