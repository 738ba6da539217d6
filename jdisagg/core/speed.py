"""How fast prefill workers compute prompts: what one says of itself, and what whoever chooses one makes of it.

A worker that was full tells its speed. One that computed short prompts, or few of them, knows bounds alone: a step takes its
time, be there many tokens in it or one. So only what is proven makes a difference: a worker is taken for as fast as the others,
unless it cannot be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high

ALIKE = 1.25  # times as fast is no difference: prompts differ as much, and what begins alike is to stay where it is


@dataclass(frozen=True, slots=True)
class Speed:
    """Prompt tokens that a worker computes in a second, as it saw of late."""

    least: float
    most: float

    def nearest(self, usual: float) -> float:
        """`usual`, unless it is proven to be slower or faster than that: then no more so than it must be."""
        if self.least / ALIKE <= usual <= self.most * ALIKE:
            return usual
        return self.least if usual < self.least else self.most


def taken_for(told: Sequence[Speed | None]) -> list[float]:
    """Tokens in a second that each of these is taken to compute; None: it has not seen, or is too old to say. Usual is the
    median of all bounds, as no other speed contradicts them less; of two the higher: who is thought too fast is tried."""
    bounds = [bound for speed in told if speed is not None for bound in (speed.least, speed.most)]
    usual = median_high(bounds) if bounds else 1.0
    return [usual if speed is None else speed.nearest(usual) for speed in told]
