"""Plan, dispatch, commit one step late: the overlap of host and device.

Step N+1 is planned and dispatched before the tokens of step N are read, so the device never waits for the host; the tokens
that step N+1 needs are in the device's own state. Where a grammar says what may be sampled next, which follows from the tokens,
step N is committed first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from jdisagg.core.requests import Output
from jdisagg.roles.ports import Runner
from jdisagg.roles.stages import Stage, StageClock
from jdisagg.sched.plan import PageTable, Plan, StepResult
from jdisagg.sched.scheduler import Scheduler

FindNan = Callable[[PageTable, int], str]  # where the KV of the first so many tokens holds infinity or NaN; never raises


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn did: the plan just dispatched (None when there was nothing to do), and the previous step."""

    plan: Plan | None
    outputs: list[Output]
    waited_s: float  # blocked on the previous step's tokens
    host_s: float  # planning and dispatching
    finished: Plan | None = None  # the previous step's
    step_s: float = 0.0  # that step: from its dispatch, or the tokens of the one before it if they came later, to its tokens

    @property
    def idle(self) -> bool:
        """True when nothing was dispatched and nothing was pending."""
        return self.plan is None and self.finished is None


@dataclass(frozen=True, slots=True)
class _Step:
    plan: Plan
    handle: Any
    dispatched_s: float  # when that began, on the clock of the stages


class StepPipeline:
    """At most one step in flight besides the one being dispatched."""

    def __init__(self, scheduler: Scheduler, runner: Runner, find_nan: FindNan) -> None:
        """`find_nan` is asked about at most one failed sequence per turn."""
        self._scheduler = scheduler
        self._runner = runner
        self._find_nan = find_nan
        self._in_flight: _Step | None = None
        self._tokens_s = -inf  # when the latest tokens were read, on the clock of the stages

    @property
    def in_flight(self) -> Plan | None:
        """The plan the device is working on, or failed at. Any thread may ask."""
        step = self._in_flight
        return None if step is None else step.plan

    def turn(self, now_s: float, stages: StageClock, listen: Callable[[], None] = lambda: None) -> Turn:
        """Plan and dispatch the next step, then commit the one before; the other way round when that one samples by a grammar.

        `listen` sleeps a moment and is called until that one is done when it computed prompts alone: such a step may take
        long, and what peers say meanwhile must not wait for its end. Steps that decode are short and waited for directly.
        """
        outputs: list[Output] = []
        waited_s = step_s = 0.0
        finished: Plan | None = None
        if self._in_flight is not None and self._in_flight.plan.by_grammar:
            finished = self._in_flight.plan
            outputs, waited_s, step_s = self._finish(self._in_flight, stages, listen)
            self._in_flight = None
        plan = self._scheduler.schedule(now_s)
        host_s = stages.lap(Stage.PLAN)
        dispatched: _Step | None = None
        if not plan.is_empty:
            dispatched_s = stages.at_s
            dispatched = _Step(plan, self._runner.dispatch(plan), dispatched_s)
            host_s += stages.lap(Stage.DISPATCH)
        if self._in_flight is not None:
            finished = self._in_flight.plan
            outputs, waited_s, step_s = self._finish(self._in_flight, stages, listen)
        self._in_flight = dispatched
        return Turn(None if plan.is_empty else plan, outputs, waited_s, host_s, finished, step_s)

    def _finish(self, step: _Step, stages: StageClock, listen: Callable[[], None]) -> tuple[list[Output], float, float]:
        """Wait for a dispatched step and commit it; also returns how long that was waited for and how long it took."""
        while not step.plan.decode and not self._runner.is_done(step.handle):
            listen()
        result = self._runner.collect(step.handle)
        if any(one.bad is not None for one in result.sampled):
            result = self._explained(result)
        waited_s = stages.lap(Stage.WAIT)
        step_s = stages.at_s - max(step.dispatched_s, self._tokens_s)
        self._tokens_s = stages.at_s
        outputs = self._scheduler.commit(result)
        stages.lap(Stage.COMMIT)
        return outputs, waited_s, step_s

    def _explained(self, result: StepResult) -> StepResult:
        """The first sequence to fail for infinity or NaN learns where in its KV it is; its pages are held until the commit."""
        for index, one in enumerate(result.sampled):
            held = None if one.bad is None else self._scheduler.kv_of_failed(result.step_id, one)
            if held is not None:
                explained = replace(one, bad=f"{one.bad}; {self._find_nan(*held)}")
                return replace(result, sampled=(*result.sampled[:index], explained, *result.sampled[index + 1 :]))
        return result
