"""The last plans reach a file when an invariant fails, and the failure goes on."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.requests import Role
from jdisagg.sched.flight_recorder import NUM_RECENT_PLANS
from jdisagg.sched.log import LoggedScheduler, make_scheduler
from jdisagg.sched.log_codec import decode
from jdisagg.sched.plan import Plan, Sampled, StepResult
from jdisagg.sched.states import IllegalTransition, Status
from tests.unit.sched.engine_fake import request


def busy_scheduler(directory: Path, num_steps: int) -> LoggedScheduler:
    """Has planned and committed `num_steps` steps of request "a", which goes on."""
    sizes = {"max_model_len": 2000, "page_size": 4, "num_pages": 500, "eos_token_ids": ()}
    scheduler = make_scheduler(SchedulerConfig(schedule_log=str(directory / "log.jsonl")), role=Role.UNIFIED, **sizes)
    assert isinstance(scheduler, LoggedScheduler)
    scheduler.add(request("a", (1,), 900), 0.0)
    for step in range(num_steps):
        scheduler.schedule(float(step))
        scheduler.commit(StepResult(step_id=step, sampled=(Sampled(slot=0, token_ids=(1,)),)), step + 0.5)
    return scheduler


def read(directory: Path) -> tuple[dict[str, object], list[tuple[float, Plan]]]:
    first, *rest = (directory / f"jdisagg-plans-unified-{os.getpid()}.jsonl").read_text().splitlines()
    return json.loads(first), [(line["now_s"], decode(line["plan"])) for line in map(json.loads, rest)]


def test_a_failing_check_writes_the_last_plans(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = busy_scheduler(tmp_path, 300)
    scheduler.table.slots.take()  # now one is lost
    with caplog.at_level(logging.CRITICAL), pytest.raises(AssertionError, match="a slot is lost"):
        scheduler.check()
    first, plans = read(tmp_path)
    assert (first["failed"], first["error"]) == ("check", "AssertionError: a slot is lost")
    assert [plan.step_id for _, plan in plans] == list(range(300 - NUM_RECENT_PLANS, 300))
    assert plans[-1] == (299.0, scheduler.recorder.plans[-1][1])
    assert f"last {NUM_RECENT_PLANS} plans: {tmp_path}" in caplog.text
    scheduler.close_log()


def test_assertions_of_schedule_and_commit_write_them_too(tmp_path: Path) -> None:
    scheduler = busy_scheduler(tmp_path, 3)
    scheduler.schedule(3.0)
    with pytest.raises(AssertionError, match="has no token for slot 0"):
        scheduler.commit(StepResult(step_id=3, sampled=()), 3.5)
    first, plans = read(tmp_path)
    assert first["failed"] == "commit"
    assert [plan.step_id for _, plan in plans] == [0, 1, 2, 3]
    scheduler.add(request("b", (2, 3), 3), 4.0)
    scheduler.table.live["b"].status = Status.PUBLISHING  # still in the queue of those that wait
    with pytest.raises(IllegalTransition):
        scheduler.schedule(4.0)
    first, _ = read(tmp_path)
    assert first["failed"] == "schedule"
    assert "publishing -> running" in str(first["error"])
    scheduler.close_log()


def test_a_directory_that_is_gone_hides_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    scheduler = busy_scheduler(directory, 2)
    scheduler.close_log()
    (directory / "log.jsonl").unlink()
    directory.rmdir()
    scheduler.table.slots.take()
    with pytest.raises(AssertionError, match="a slot is lost"):
        scheduler.check()
    assert "its plans are lost" in caplog.text
