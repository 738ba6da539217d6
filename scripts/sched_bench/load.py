"""What a scheduler is driven with, and how: the same requests for everybody, a runner that answers at once."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

PAGE_SIZE = 16  # tokens
TOKEN_BUDGET = 2048  # tokens per step
MAX_FILL_TICKS = 5000
WARM_TICKS, TICKS = 32, 256
STEADY_OUTPUT = 2000  # tokens; nobody ends while a steady load is measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """`running` slots, all taken; `waiting` more requests that find none. `churn`: short outputs, each end brings one more."""

    running: int
    waiting: int = 0
    churn: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        return f"{'churn' if self.churn else 'steady'} {self.running} running, {self.waiting} waiting"

    @property
    def num_pages(self) -> int:
        """A pool in which memory is never short: longest sequences, finished ones that stay cached, and a fifth more."""
        longest = 96 if self.churn else WARM_TICKS + TICKS + MAX_FILL_TICKS * self.running // 10_000
        pages = -(-(128 + longest) // PAGE_SIZE) + 1
        return max(int(1.25 * self.running * pages), (128 + STEADY_OUTPUT) // PAGE_SIZE) + 64

    def request(self, number: int) -> tuple[list[int], int]:
        """Prompt token ids and output length of request `number`: 64 to 128 tokens; 32 to 96, or more than is measured."""
        draw = random.Random(number)
        prompt = draw.choices(range(100, 30_000), k=draw.randint(64, 128))
        return prompt, draw.randint(32, 96) if self.churn else STEADY_OUTPUT


@dataclass(frozen=True, slots=True)
class Tick:
    """Host time of one step's decision and of taking its results in; the runner between them is not counted.

    CPU time of the thread, so that other processes on the machine do not add to it; a scheduler never waits.
    """

    schedule_ns: int
    commit_ns: int
    decode_rows: int
    new_tokens: int
    ended: int  # requests whose last token this was

    @property
    def total_ns(self) -> int:
        """Both."""
        return self.schedule_ns + self.commit_ns


class Subject(Protocol):
    """A scheduler under measurement."""

    def add(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """Queue a request."""
        ...

    def tick(self) -> Tick:
        """Decide a step, let it run in no time, take its results in."""
        ...


def drive(make: Callable[[Load], Subject], load: Load) -> list[Tick]:
    """Fill a fresh scheduler and return the measured ticks. What was made before is frozen, as in a server that is ready;
    the garbage collector stays on.

    Raises RuntimeError when the slots do not fill up.
    """
    subject = make(load)
    gc.collect()
    gc.freeze()
    try:
        number = 0
        while number < load.running + load.waiting:
            subject.add(number, *load.request(number))
            number += 1
        fill = 0
        while (tick := subject.tick()).decode_rows < load.running * (0.8 if load.churn else 1.0):
            number = _replace(subject, load, number, tick.ended)
            fill += 1
            if fill > MAX_FILL_TICKS:
                raise RuntimeError(f"{load.name}: {tick.decode_rows} rows decode after {fill} steps, wanted {load.running}")
        number = _replace(subject, load, number, tick.ended)
        ticks = []
        for i in range(WARM_TICKS + TICKS):
            tick = subject.tick()
            number = _replace(subject, load, number, tick.ended)
            if i >= WARM_TICKS:
                ticks.append(tick)
        return ticks
    finally:
        gc.unfreeze()


def _replace(subject: Subject, load: Load, number: int, ended: int) -> int:
    """One new request for each that ended; the number of the next."""
    for i in range(number, number + ended):
        subject.add(i, *load.request(i))
    return number + ended
