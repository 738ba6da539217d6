"""Arbitrary loads for the fake engine, and an engine that shows every step to a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from jdisagg.core.requests import EngineRequest
from jdisagg.sched.plan import Plan
from tests.unit.sched.engine_fake import FakeEngine, expected, request


@dataclass(frozen=True)
class Arrival:
    """One request of a load: `after` ticks pass before it comes."""

    after: int
    length: int
    max_tokens: int
    priority: int

    def request(self, number: int) -> EngineRequest:
        """Every prompt is its own, so that prefixes are not shared by chance."""
        prompt = (number % 30 + 1, *((number * 7 + i) % 31 for i in range(1, self.length)))
        return request(f"r{number}", prompt, self.max_tokens, priority=self.priority)


LOADS = st.lists(
    st.builds(
        Arrival, after=st.integers(0, 4), length=st.integers(1, 24), max_tokens=st.integers(1, 12), priority=st.integers(0, 3)
    ),
    min_size=2,
    max_size=14,
)


class Watched(FakeEngine):
    """A fake engine that plays a load and shows every step to `saw`, with the pages that were free before it."""

    def play(self, load: list[Arrival]) -> None:
        """Serve a whole load; every stream must be right."""
        asked = []
        for number, arrival in enumerate(load):
            for _ in range(arrival.after):
                self.tick()
            asked.append(arrival.request(number))
            self.add(asked[-1])
        self.run(max_ticks=3000)
        for one in asked:
            assert self.seen[one.request_id].tokens == expected(one.prompt_token_ids, one.sampling.max_tokens)

    def step(self) -> Plan:
        """As FakeEngine.step."""
        was = self.scheduler.snapshot()
        plan = super().step()
        self.saw(plan, was)
        return plan

    def saw(self, plan: Plan, was: dict[str, Any]) -> None:
        """A step was dispatched; `was` is the scheduler just before."""
