"""An engine and a clock that tests move by hand, and what the engine's metrics say of the time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import EngineRequest, Output, Role
from jdisagg.roles.inbox import Submit
from jdisagg.roles.unified import UnifiedRole
from tests.unit.roles.engine import Engine
from tests.unit.roles.world import World
from tests.unit.sched.engine_fake import request

PHASES = ("queue", "prefill", "transfer", "decode")


def read(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"jdisagg_{name}", labels) or 0.0


def phase_sum(metrics: Metrics) -> float:
    return sum(read(metrics, f"request_{phase}_seconds_sum") for phase in PHASES)


def drive(world: World, draw: random.Random, num_requests: int) -> None:
    """Shared beginnings, deadlines, cancels, lost pieces and cut streams; in small pools requests lose their pages, too."""
    prompts: list[tuple[int, ...]] = [()]
    for index in range(num_requests):
        prompts.append((draw.choice(prompts) + tuple(draw.randrange(1, 9) for _ in range(draw.randrange(1, 24))))[:24])
        deadline_s = world.now_s + draw.choice([0.05, 1e6, 1e6, 1e6])
        world.submit(request(f"r{index}", prompts[-1], draw.randrange(1, 24), deadline_s=deadline_s))
        for _ in range(draw.randrange(9)):
            world.tick()
        if draw.random() < 0.15:
            world.cancel(f"r{draw.randrange(index + 1)}")
        if draw.random() < 0.2:
            world.network.lose_next += 1
        if draw.random() < 0.2 and world.wire.open_streams:
            world.wire.cut(draw.choice(list(world.wire.open_streams)), "dead")
    world.settle()


class Unified:
    """A unified engine stepped by hand, 10 ms a tick, in which no time passes."""

    def __init__(self, num_pages: int = 24, slow_request_s: float = 1e9, **settings: Any) -> None:
        self.engine = Engine(Role.UNIFIED, num_pages, True, **settings)
        self.engine.run(UnifiedRole(self.engine.scheduler), slow_request_s=slow_request_s, clock=lambda: self.now_s)
        self.outputs: list[Output] = []
        self.now_s = 100.0

    def submit(self, asked: EngineRequest) -> None:
        self.engine.inbox.post(Submit(asked, self.outputs.extend))

    def tick(self) -> None:
        self.now_s += 0.01
        self.engine.tick(self.now_s)

    def run(self) -> None:
        for _ in range(500):
            self.tick()
            assert self.engine.loop is not None
            if not self.engine.loop.num_unfinished and self.engine.scheduler.is_idle():
                return
        raise AssertionError(f"not idle: {self.engine.scheduler.snapshot()}")

    def requests(self) -> dict[str, Any]:
        assert self.engine.loop is not None
        return self.engine.loop.snapshot()["requests"]


class Ticking:
    """A clock that moves only when a part says that it worked."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s

    def slow(self, function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slowed(*args: Any, **kwargs: Any) -> Any:
            self.now_s += seconds
            return function(*args, **kwargs)

        return slowed
