"""Stages of an engine's tick: with the phases of its requests they add up to the time that passed."""

from __future__ import annotations

import pytest

from jdisagg.core.requests import Output, Role
from jdisagg.roles.inbox import Message, Submit
from jdisagg.roles.stages import Stage
from jdisagg.roles.unified import UnifiedRole
from tests.unit.roles.engine import Engine
from tests.unit.roles.measured import Ticking, phase_sum, read
from tests.unit.sched.engine_fake import request

pytestmark = pytest.mark.usefixtures("no_sleep")


@pytest.mark.covers("V38")
def test_stages_of_ticks_and_phases_of_requests_add_up_to_the_time_that_passed() -> None:
    clock = Ticking()
    engine = Engine(Role.UNIFIED, 9, True, reserved_decode_tokens=0)
    side = UnifiedRole(engine.scheduler)
    seconds = dict(zip(Stage, (0.1, 0.002, 0.003, 0.005, 0.007, 0.011, 0.013, 0.017), strict=True))
    drain, idle_s, inbox_s = engine.inbox.drain, seconds[Stage.IDLE], seconds[Stage.INBOX]

    def slow_drain(wait_s: float) -> list[Message]:
        clock.now_s += idle_s if loop._was_idle else inbox_s
        return drain(wait_s)

    engine.inbox.drain = slow_drain  # type: ignore[method-assign]
    side.before_step = clock.slow(side.before_step, seconds[Stage.PEERS])  # type: ignore[method-assign]
    engine.scheduler.schedule = clock.slow(engine.scheduler.schedule, seconds[Stage.PLAN])  # type: ignore[method-assign]
    engine.runner.dispatch = clock.slow(engine.runner.dispatch, seconds[Stage.DISPATCH])  # type: ignore[method-assign]
    engine.runner.collect = clock.slow(engine.runner.collect, seconds[Stage.WAIT])  # type: ignore[method-assign]
    engine.scheduler.commit = clock.slow(engine.scheduler.commit, seconds[Stage.COMMIT])  # type: ignore[method-assign]
    engine.streams.deliver = clock.slow(engine.streams.deliver, seconds[Stage.DELIVER])  # type: ignore[method-assign]
    engine.run(side, clock=clock)
    loop = engine.loop
    assert loop is not None
    came_s: dict[str, float] = {}
    took_s: dict[str, float] = {}

    def sink(outputs: list[Output]) -> None:
        took_s.update({o.request_id: clock.now_s - came_s[o.request_id] for o in outputs if o.finish})

    def host_s() -> float:
        return sum(
            read(engine.metrics, "tick_seconds_total", stage=s.value) for s in Stage if s not in (Stage.IDLE, Stage.WAIT)
        )

    def tick() -> bool:
        """Whether a step was dispatched."""
        before_s = host_s()
        dispatched = engine.tick(clock.now_s) and loop._pipeline.in_flight is not None
        if dispatched:
            in_dispatching_ticks.append(host_s() - before_s)
        return dispatched

    in_dispatching_ticks: list[float] = []
    num_ticks = num_steps = num_idle = 0
    for index in range(5):
        name = f"r{index}"
        engine.inbox.post(Submit(request(name, tuple(range(1, 5 + 2 * index)), 12), sink))
        for _ in range(2):
            num_idle += loop._was_idle
            came_s.setdefault(name, clock.now_s)
            num_steps += tick()
            num_ticks += 1
    while not engine.scheduler.is_idle() or loop.num_unfinished:
        num_idle += loop._was_idle
        num_steps += tick()
        num_ticks += 1
    for _ in range(4):
        num_idle += loop._was_idle
        num_steps += tick()
        num_ticks += 1
    assert num_idle > 0
    metrics = engine.metrics
    measured = {stage: read(metrics, "tick_seconds_total", stage=stage.value) for stage in Stage}
    counts = {
        Stage.IDLE: num_idle, Stage.INBOX: num_ticks - num_idle, Stage.PEERS: num_ticks, Stage.PLAN: num_ticks,
        Stage.DISPATCH: num_steps, Stage.WAIT: num_steps, Stage.COMMIT: num_steps, Stage.DELIVER: num_ticks,
    }  # fmt: skip
    assert measured == pytest.approx({stage: seconds[stage] * count for stage, count in counts.items()})
    assert sum(measured.values()) == pytest.approx(clock.now_s - 50.0)
    assert read(metrics, "host_overhead_seconds_count") == num_steps
    assert read(metrics, "host_overhead_seconds_sum") == pytest.approx(sum(in_dispatching_ticks))
    assert metrics.engine.preemptions._value.get() > 0
    assert len(took_s) == 5
    assert read(metrics, "request_seconds_count") == 5
    assert phase_sum(metrics) == pytest.approx(read(metrics, "request_seconds_sum"))
    # a client has its last token a delivery, and the commit before it, after the engine marked it
    slack_s = seconds[Stage.DELIVER] + seconds[Stage.COMMIT] + seconds[Stage.PEERS] + seconds[Stage.IDLE]
    assert read(metrics, "request_seconds_sum") == pytest.approx(sum(took_s.values()), abs=5 * slack_s)
