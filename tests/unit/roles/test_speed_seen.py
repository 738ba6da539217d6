"""What a prefill worker says of its speed."""

from __future__ import annotations

import pytest

from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.core.speed import Speed
from jdisagg.roles.observer import TickObserver
from jdisagg.roles.pipeline import Turn
from jdisagg.roles.speed_seen import DEEP, FEW, LATEST, OLD_S, SpeedSeen
from jdisagg.sched.plan import Plan, PrefillChunk
from tests.unit.roles.engine import Engine

FULL_TOKENS = 512


def seen(*steps: tuple[int, float], now_s: float = 10.0) -> SpeedSeen:
    """Steps of so many tokens that took so many seconds."""
    speed = SpeedSeen(FULL_TOKENS)
    for num_tokens, step_s in steps:
        speed.add(num_tokens, step_s, now_s)
    return speed


def test_full_steps_tell_it_and_others_give_bounds() -> None:
    assert seen(*[(512, 0.5)] * 3).told(10.0) == Speed(1024, 1024)
    assert seen(*[(64, 0.25)] * 3).told(10.0) == Speed(256, 2048)
    assert seen(*[(600, 0.5)] * 3).told(10.0) == Speed(1200, 1200), "whatever a step holds: it was computed"


def test_of_few_steps_nothing_is_said() -> None:
    steps = [(512, 0.5)] * FEW
    assert seen(*steps[1:]).told(10.0) is None
    assert seen(*steps[1:], (512, 0.0)).told(10.0) is None, "one that took no time is no step"
    assert seen(*steps).told(10.0) is not None


def test_two_steps_that_were_held_up_make_it_no_slower_and_three_that_are_slow_do() -> None:
    steps = [(512, 0.5)] * LATEST
    assert seen(*steps, (512, 50.0), (512, 50.0)).told(10.0) == Speed(1024, 1024)
    assert seen(*steps, *[(512, 5.0)] * 3).told(10.0) == Speed(102.4, 102.4)
    assert seen(*[(512, 5.0)] * LATEST, *[(512, 0.5)] * 3).told(10.0) == Speed(1024, 1024), "and fast again likewise"


def test_what_was_seen_long_ago_says_nothing_any_more() -> None:
    speed = seen(*[(512, 5.0)] * LATEST)
    assert speed.told(10.0 + OLD_S) is not None
    assert speed.told(10.1 + OLD_S) is None
    speed.add(512, 0.5, 11.0 + OLD_S)
    assert speed.told(11.0 + OLD_S) is None


def plan(*num_tokens: int, decode: tuple[int, ...] = (), starts: tuple[int, ...] = (0, 0)) -> Plan:
    chunks = (
        PrefillChunk(slot=0, request_id="r", start=start, token_ids=(1,) * num, samples=True)
        for start, num in zip(starts, num_tokens, strict=False)
    )
    return Plan(step_id=1, prefill=tuple(chunks), decode=decode)


@pytest.mark.parametrize("speed", [SpeedSeen(FULL_TOKENS), None])
def test_the_load_of_a_prefill_worker_tells_it(speed: SpeedSeen | None) -> None:
    engine = Engine(Role.PREFILL, 9, True)
    observer = TickObserver(engine.scheduler, Metrics(), Role.PREFILL, speed=speed)
    deep = plan(8, 8, starts=(0, DEEP))  # a long prompt is slower at its end, whoever computes it
    others = [plan(), plan(64, decode=(1,)), None, deep] * 3  # nothing is computed, or not prompts alone
    for finished in (plan(64, 64), plan(128), plan(100, 28, starts=(DEEP - 1, 0)), *others):
        observer.observe(Turn(None, [], 0.0, 0.0, finished, 0.25), 0, 10.0)
    assert observer.load.speed == (speed and Speed(512, 2048))
    observer.observe(Turn(None, [], 0.0, 0.0), 0, 11.0 + OLD_S)
    assert observer.load.speed is None
