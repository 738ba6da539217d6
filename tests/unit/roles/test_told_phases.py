"""A request's life in a schedule log (`jdisagg.replay --why`) has the phases that its worker counts, on P as on D."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.requests import Role
from jdisagg.replay import replay
from jdisagg.sched.log import LoggedScheduler, make_scheduler
from tests.unit.roles import engine
from tests.unit.roles.measured import PHASES, Ticking, drive
from tests.unit.roles.world import World

pytestmark = pytest.mark.usefixtures("no_sleep")

_PHASE = re.compile(rf"({'|'.join(PHASES)}) ([\d.]+) (ms|s)\b")
_ROUNDED_S = 0.002  # ticks are 10 ms


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[Path, LoggedScheduler]]:
    """Every engine writes a schedule log."""
    schedulers: dict[Path, LoggedScheduler] = {}

    def make(config: SchedulerConfig, *, role: Role, **sizes: Any) -> LoggedScheduler:
        path = tmp_path / f"{role.value}-{len(schedulers)}.jsonl"
        made = make_scheduler(replace(config, schedule_log=str(path)), role=role, **sizes)
        assert isinstance(made, LoggedScheduler)
        schedulers[path] = made
        return made

    monkeypatch.setattr(engine, "Scheduler", make)
    yield schedulers
    for scheduler in schedulers.values():
        scheduler.close_log()


def seconds(text: str) -> dict[str, float]:
    """By phase."""
    return {phase: float(number) * (0.001 if unit == "ms" else 1.0) for phase, number, unit in _PHASE.findall(text)}


@pytest.mark.parametrize("seed", range(4))
def test_the_phases_told_of_a_request_are_those_counted(
    seed: int, logs: dict[Path, LoggedScheduler], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "jdisagg.core.record")
    more: dict[str, Any] = {"num_scheduler_steps": 1 + seed % 2, "host_tokens": 40 * (seed // 2), "clock": Ticking()}
    world = World(local_prefill=seed % 2 == 0, decode_pages=14, prefill_pages=14, want_min_tokens=seed % 3, **more)
    for scheduler in logs.values():
        scheduler._clock = lambda: world.now_s
    drive(world, random.Random(seed), 12)
    counted: dict[str, list[str]] = {}
    for record in caplog.records:
        if record.name == "jdisagg.core.record":
            request_id, life = record.getMessage().removeprefix("request ").split(": ", 1)
            counted.setdefault(request_id, []).append(life)
    for path, scheduler in logs.items():
        scheduler.close_log()
        lines = path.read_text().splitlines(keepends=True)
        for request_id in replay(lines).request_ids:
            (life,), story = counted[request_id], replay(lines, request_id).story
            told, wanted = seconds(story[-1]), seconds(life)
            for phase in PHASES:
                assert told.get(phase, 0.0) == pytest.approx(wanted.get(phase, 0.0), abs=_ROUNDED_S, rel=0.01), (story, life)
