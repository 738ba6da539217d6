"""The last plans reach a file when an invariant fails, and the failure goes on."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.requests import Role, SamplingParams
from jdisagg.sched.flight_recorder import MAX_ADMITTED_TOKENS, NUM_RECENT_PLANS, FlightRecorder
from jdisagg.sched.log import LoggedScheduler, make_scheduler
from jdisagg.sched.log_codec import decode
from jdisagg.sched.plan import Admit, Plan, Sampled, StepResult
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
        scheduler.commit(StepResult(step_id=step, sampled=(Sampled(slot=0, token_ids=(1,)),)))
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
        scheduler.commit(StepResult(step_id=3, sampled=()))
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


def admitting(step_id: int, num_prompt: int, num_generated: int) -> Plan:
    """One request."""
    admit = Admit(
        slot=0,
        request_id=f"r{step_id}",
        choice=0,
        sampling=SamplingParams(),
        stop_ids=(),
        page_table=((),),
        prompt_token_ids=(1,) * num_prompt,
        generated_token_ids=(1,) * num_generated,
        decodes=False,
    )
    return Plan(step_id=step_id, admit=(admit,))


def test_prompts_of_plans_long_past_are_not_kept() -> None:
    """Plans are few, but each may admit many requests with long prompts behind a cached beginning."""
    recorder, share = FlightRecorder(None, "unified"), MAX_ADMITTED_TOKENS // 4
    kept = []
    for step in range(6):
        recorder.add(0.0, admitting(step, share - 10, 10))
        kept.append([plan.step_id for _, plan in recorder.plans])
    assert kept == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]
    recorder.add(0.0, admitting(6, MAX_ADMITTED_TOKENS, 1))  # the latest is kept, whatever it admits
    assert [plan.step_id for _, plan in recorder.plans] == [6]
    for step in range(7, 7 + NUM_RECENT_PLANS):
        recorder.add(0.0, Plan(step_id=step, decode=(0,)))
    assert [plan.step_id for _, plan in recorder.plans] == list(range(7, 7 + NUM_RECENT_PLANS))
    recorder.add(0.0, admitting(300, MAX_ADMITTED_TOKENS, 0))  # what was let go counts no more
    assert len(recorder.plans) == NUM_RECENT_PLANS


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
