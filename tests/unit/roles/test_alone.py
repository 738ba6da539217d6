"""A worker without anybody to talk to: it can be warmed and found healthy, and holds nothing afterwards."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from jdisagg.core.errors import NumericalError
from jdisagg.core.requests import FinishReason, Output, Role
from jdisagg.roles.engine_thread import EngineThread
from jdisagg.roles.self_test import self_test
from jdisagg.sched.plan import Plan, Sampled, StepResult
from tests.unit.roles.world import PEERS, World
from tests.unit.waiting import until


def answer(plan: Plan) -> StepResult:
    """A step on a cache that holds numbers from the start, whoever wrote them: any will do for a self-test."""
    rows = [chunk.slot for chunk in plan.prefill if chunk.samples] + list(plan.decode)
    tokens = (1,) * plan.num_steps
    return StepResult(step_id=plan.step_id, sampled=tuple(Sampled(slot=slot, token_ids=tokens) for slot in rows))


@pytest.mark.covers("P04")
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_each_role_passes_its_self_test_without_the_other(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(local_prefill=False)
    world.wire.down = set(PEERS)
    engine = world.prefill if role is Role.PREFILL else world.decode
    assert engine.loop is not None
    monkeypatch.setattr(engine.runner, "dispatch", answer)
    monkeypatch.setattr(engine.runner, "collect", lambda result: result)
    salts, begin = [], engine.loop.self_test
    monkeypatch.setattr(engine.loop, "self_test", lambda asked, *rest: (salts.append(asked.cache_salt), begin(asked, *rest)))
    crashes: list[BaseException] = []
    thread = EngineThread(engine.loop, name="engine", on_crash=crashes.append)
    thread.start()
    try:
        for _ in range(2):
            self_test(thread)
        assert thread.unhealthy_reason(time.monotonic()) == ""
        until(lambda: thread.call(engine.scheduler.is_idle), "the step behind the last token ends")
    finally:
        assert thread.stop(5.0)
    assert crashes == []
    steps = engine.scheduler.stats
    if role is Role.DECODE:
        assert (steps.prefill_tokens, world.wire.num_opened) == (0, 0), "its KV came from nobody"
        assert len({*salts, "self-test"}) == 3, "so no client may find it"
    else:
        assert steps.prefill_tokens == 2 * 3
    world.assert_quiescent()


def test_a_self_test_of_a_prefill_worker_ends_with_its_first_token_or_with_its_error() -> None:
    world = World()
    token = Output(request_id="self-test", token_ids=(5,))
    failed = Output(request_id="self-test", finish=FinishReason.ERROR, error=NumericalError("NaN"))
    assert world.prefill_role.after_step(None, [failed], 0.0) == [failed]
    assert world.prefill_role.after_step(None, [token], 0.0) == [replace(token, finish=FinishReason.LENGTH)]
