"""How long steps take by phase: each one's time is its own, of the last one of a busy spell, too."""

from __future__ import annotations

import pytest

from jdisagg.core.requests import Role
from jdisagg.roles.inbox import Submit
from jdisagg.roles.unified import UnifiedRole
from jdisagg.sched.plan import Plan, StepResult
from tests.unit.roles.engine import Engine
from tests.unit.roles.measured import Ticking, read
from tests.unit.sched.engine_fake import request

pytestmark = pytest.mark.usefixtures("no_sleep")

SECONDS = {"prefill": 2.0, "mixed": 3.0, "decode": 0.125, "upkeep": 0.0}


class Device:
    """Works on one step after the other, each as long as its phase says; a clock moves when somebody waits for it."""

    def __init__(self, engine: Engine, clock: Ticking) -> None:
        self.phases: list[str] = []
        self._clock, self._done_s = clock, clock.now_s
        self._ends: list[float] = []
        self._dispatch, self._collect = engine.runner.dispatch, engine.runner.collect
        engine.runner.dispatch = self.dispatch  # type: ignore[method-assign]
        engine.runner.collect = self.collect  # type: ignore[method-assign]

    def dispatch(self, plan: Plan) -> object:
        computes_prompts = "mixed" if plan.decode else "prefill"
        self.phases.append(computes_prompts if plan.prefill else "decode" if plan.decode else "upkeep")
        self._done_s = max(self._done_s, self._clock.now_s) + SECONDS[self.phases[-1]]
        self._ends.append(self._done_s)
        return self._dispatch(plan)

    def collect(self, handle: object) -> StepResult:
        self._clock.now_s = max(self._clock.now_s, self._ends.pop(0))
        return self._collect(handle)  # type: ignore[arg-type]


def test_the_time_of_a_step_counts_under_its_own_phase_and_once_though_the_next_one_was_dispatched_before_its_end() -> None:
    clock, engine = Ticking(), Engine(Role.UNIFIED, 24, True)
    device = Device(engine, clock)
    engine.run(UnifiedRole(engine.scheduler), clock=clock)
    for spell in ({"a": 3}, {"b": 1}, {"c": 9, "joins": 2}):  # between them the engine is idle, which is no step's time
        for name, num_tokens in spell.items():
            engine.inbox.post(Submit(request(name, tuple(range(3, 12)), num_tokens, ignore_eos=True), lambda outputs: None))
            for _ in range(4):
                engine.tick(clock.now_s)
        while engine.tick(clock.now_s):
            pass
        clock.now_s += 60.0
    for phase, seconds in SECONDS.items():
        count = device.phases.count(phase)
        assert count > 0
        assert read(engine.metrics, "step_seconds_count", phase=phase) == count, phase
        assert read(engine.metrics, "step_seconds_sum", phase=phase) == pytest.approx(count * seconds), phase
