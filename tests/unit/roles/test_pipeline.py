"""The order of planning, dispatching and committing, what time it is then, and what is asked about a failed sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jdisagg.core.requests import EngineRequest, Grammar, GrammarKind, Output, Role
from jdisagg.roles.pipeline import StepPipeline
from jdisagg.roles.stages import StageClock
from jdisagg.sched.plan import PageTable, Plan, StepResult
from tests.unit.roles.engine import Engine
from tests.unit.roles.measured import Ticking
from tests.unit.sched.engine_fake import expected, request

GRAMMAR = Grammar(GrammarKind.REGEX, "[a-z]*")
PLAN_S, DISPATCH_S, WAIT_S = 0.5, 0.25, 2.0


class Line:
    """A pipeline whose parts take their time and note that they were called; a step takes one look at its end to be done."""

    def __init__(self, *asked: EngineRequest) -> None:
        self.clock, self.calls = Ticking(), list[str]()
        self.explained: list[tuple[PageTable, int]] = []
        self.engine = Engine(Role.UNIFIED, 24, True)
        self.pipeline = StepPipeline(self.engine.scheduler, self.engine.runner, self._find_nan)
        self._stages = StageClock(self.engine.metrics, self.clock)
        self._stages.start()
        self._note(self.engine.scheduler, "schedule", PLAN_S)
        self._note(self.engine.runner, "dispatch", DISPATCH_S)
        self._note(self.engine.runner, "collect", WAIT_S)
        self._note(self.engine.scheduler, "commit", 0.0)
        self.engine.runner.meanwhile = lambda: None
        for one in asked:
            self.engine.scheduler.add(one, 0.0)

    def _note(self, part: Any, name: str, seconds: float) -> None:
        function: Callable[..., Any] = self.clock.slow(getattr(part, name), seconds)

        def noted(*args: Any) -> Any:
            self.calls.append(name)
            return function(*args)

        setattr(part, name, noted)

    def _find_nan(self, page_table: PageTable, num_tokens: int) -> str:
        self.explained.append((page_table, num_tokens))
        return "layer 3 of page 7"

    def turn(self, now_s: float) -> tuple[list[Output], float, float]:
        """What it brought, what the host needed, what was waited; `calls` are those of this turn."""
        self.calls.clear()
        turn = self.pipeline.turn(now_s, self._stages, lambda: self.calls.append("listen"))
        assert self.pipeline.in_flight is turn.plan
        assert (turn.finished is not None) == ("commit" in self.calls)
        assert turn.idle == (turn.plan is None and "commit" not in self.calls)
        return turn.outputs, turn.host_s, turn.waited_s


def test_a_step_is_committed_when_the_next_one_runs() -> None:
    line = Line(request("a", (1, 2, 3), 2))
    assert line.turn(100.0) == ([], PLAN_S + DISPATCH_S, 0.0)
    assert line.calls == ["schedule", "dispatch"]
    (first,), host_s, waited_s = line.turn(200.0)
    assert line.calls == ["schedule", "dispatch", "listen", "collect", "commit"], "it computed a prompt: peers are heard"
    assert (host_s, waited_s) == (PLAN_S + DISPATCH_S, WAIT_S)
    (second,), host_s, waited_s = line.turn(300.0)
    assert line.calls[-2:] == ["collect", "commit"]
    assert "listen" not in line.calls, "steps that decode are short"
    assert [*first.token_ids, *second.token_ids] == expected((1, 2, 3), 2)


def test_a_step_that_samples_by_a_grammar_is_committed_before_the_next_one_is_planned() -> None:
    line = Line(request("a", (1, 2, 3), 2, grammar=GRAMMAR))
    line.turn(100.0)
    (first,), host_s, waited_s = line.turn(200.0)
    assert line.calls == ["listen", "collect", "commit", "schedule", "dispatch"]
    assert (host_s, waited_s) == (PLAN_S + DISPATCH_S, WAIT_S)
    (second,), _, _ = line.turn(300.0)
    assert line.calls[:3] == ["collect", "commit", "schedule"]
    assert [*first.token_ids, *second.token_ids] == expected((1, 2, 3), 2)
    while line.calls != ["schedule"]:
        line.turn(400.0)


@pytest.mark.parametrize("grammar", [None, GRAMMAR])
def test_a_step_that_fails_where_it_is_waited_for_is_the_one_that_is_shown(grammar: Grammar | None) -> None:
    line = Line(request("a", (1, 2, 3), 2, grammar=grammar))
    line.turn(100.0)
    failing, pipeline = line.pipeline.in_flight, line.pipeline
    shown: list[Plan | None] = []

    def fail(handle: Any) -> StepResult:
        shown.append(pipeline.in_flight)
        raise RuntimeError("the device is gone")

    line.engine.runner.collect = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the device is gone"):
        line.turn(200.0)
    assert failing is not None
    assert shown == [failing], "also by the watchdog, while it hangs"
    assert pipeline.in_flight is failing


@pytest.mark.parametrize("bad_slots", [{0}, {1}, {0, 1}])
def test_of_the_sequences_that_fail_in_a_step_the_first_one_learns_where_its_kv_is_bad(bad_slots: set[int]) -> None:
    line = Line(request("a", (1, 2, 3), 2), request("b", (4, 5, 6, 7), 2))
    line.turn(100.0)
    line.engine.runner.device.bad |= bad_slots
    line.turn(200.0)
    outputs, _, _ = line.turn(300.0)
    said = {output.request_id: output.error.message for output in outputs if output.error is not None}
    names = [name for slot, name in enumerate("ab") if slot in bad_slots]
    assert sorted(said) == names
    assert ["layer 3 of page 7" in said[name] for name in names] == [True, False][: len(names)]
    assert all("NaN in layer 1" in text for text in said.values())
    ((_, num_tokens),) = line.explained
    assert num_tokens == {"a": 4, "b": 5}[names[0]]
