"""The fixture of tests that read a request's story out of a schedule log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jdisagg.core.requests import Role
from jdisagg.replay import replay
from tests.unit.sched.engine_fake import FakeEngine
from tests.unit.sched.story import Tell


@pytest.fixture
def tell(tmp_path: Path) -> Tell:
    """The story of one request in the log of what `drive` did."""

    def run(drive: Callable[[FakeEngine], None], name: str, role: Role = Role.UNIFIED, **config: Any) -> list[str]:
        path = tmp_path / "schedule.jsonl"
        engine = FakeEngine(role, schedule_log=str(path), **config)
        drive(engine)
        engine.scheduler.close_log()
        with path.open() as lines:
            report = replay(lines, name)
        assert report.difference is None, "asking why changed a plan"
        assert report.damage is None
        return [line.strip() for line in report.story]

    return run
