"""What the file of the last plans and the log line about it say, to the letter: somebody reads them after a crash."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.requests import Role
from jdisagg.sched.flight_recorder import MAX_FILES, FlightRecorder
from jdisagg.sched.log import LoggedScheduler, make_scheduler
from jdisagg.sched.log_codec import encode
from jdisagg.sched.plan import Plan, StepResult
from jdisagg.sched.states import Status
from tests.unit.sched.engine_fake import request


def fail(recorder: FlightRecorder, state: dict[str, Any] | Exception) -> None:
    """An invariant breaks inside the call "commit"; the state of the moment is `state`, or raises it."""

    def snapshot() -> dict[str, Any]:
        if isinstance(state, Exception):
            raise state
        return state

    with pytest.raises(AssertionError, match="a slot is lost"), recorder.writing_on_failure("commit", snapshot):
        raise AssertionError("a slot is lost")


def test_each_line_is_compact_and_the_first_has_the_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = FlightRecorder(tmp_path, "decode")
    recorder.add(1.5, Plan(step_id=4, decode=(2,)))
    recorder.add(2.5, Plan(step_id=5))  # empty: not kept, but the latest
    with caplog.at_level(logging.CRITICAL):
        fail(recorder, {"pages": 3})
    path = tmp_path / f"jdisagg-plans-decode-{os.getpid()}.jsonl"
    plan = json.dumps(encode(Plan(step_id=4, decode=(2,))), separators=(",", ":"))
    assert path.read_text() == (
        '{"failed":"commit","error":"AssertionError: a slot is lost","state":{"pages":3}}\n'
        + f'{{"now_s":1.5,"plan":{plan}}}\n'
    )
    assert caplog.messages == [f"invariant of the scheduler failed in commit: a slot is lost; last 1 plans: {path}"]
    assert recorder.latest == Plan(step_id=5)


def test_a_state_that_cannot_be_told_is_told_so(tmp_path: Path) -> None:
    fail(FlightRecorder(tmp_path, "prefill"), ValueError("broken too"))
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["state"] == {"error": "ValueError('broken too')"}


@pytest.mark.parametrize("num_before", [1, MAX_FILES - 2, MAX_FILES - 1, MAX_FILES, 2 * MAX_FILES])
def test_a_process_that_fails_after_each_start_does_not_fill_the_disk(num_before: int, tmp_path: Path) -> None:
    for pid in range(num_before):  # of processes before this one; the younger they are the later they wrote
        written = tmp_path / f"jdisagg-plans-decode-{10_000_000 - pid}.jsonl"
        written.write_text("plans")
        os.utime(written, (1000.0 + pid, 1000.0 + pid))
    others = {"jdisagg-plans-prefill-10000000.jsonl", "jdisagg-plans-decode-kept.jsonl", "jdisagg-plans-decode-1.jsonl.gz"}
    for name in others:
        (tmp_path / name).write_text("another's")
        os.utime(tmp_path / name, (1.0, 1.0))
    fail(FlightRecorder(tmp_path, "decode"), {})
    left = {path.name for path in tmp_path.iterdir()} - {f"jdisagg-plans-decode-{os.getpid()}.jsonl"}
    latest = {f"jdisagg-plans-decode-{10_000_000 - pid}.jsonl" for pid in range(num_before)[-(MAX_FILES - 1) :]}
    assert left == others | latest


def test_files_of_other_users_are_left_and_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {f"jdisagg-plans-decode-{10_000_000 + pid}.jsonl" for pid in range(2 * MAX_FILES)}
    for name in theirs:
        (tmp_path / name).write_text("plans")
    someone = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: someone + 1)
    fail(FlightRecorder(tmp_path, "decode"), {})
    assert {path.name for path in tmp_path.iterdir()} == {*theirs, f"jdisagg-plans-decode-{os.getpid()}.jsonl"}


def test_files_that_cannot_be_removed_are_left(tmp_path: Path) -> None:
    for pid in range(2 * MAX_FILES):
        (tmp_path / f"jdisagg-plans-decode-{10_000_000 + pid}.jsonl").mkdir()
    fail(FlightRecorder(tmp_path, "decode"), {"pages": 3})
    assert json.loads((tmp_path / f"jdisagg-plans-decode-{os.getpid()}.jsonl").read_text())["state"] == {"pages": 3}


def test_what_clients_sent_is_for_this_user_alone_and_lies_in_no_file_of_another(tmp_path: Path) -> None:
    """The directory is one that everybody writes to, and the name can be foreseen."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path = tmp_path / f"jdisagg-plans-decode-{os.getpid()}.jsonl"
    path.symlink_to(victim)
    fail(FlightRecorder(tmp_path, "decode"), {})
    assert victim.read_text() == "mine"
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o077 == 0
    fail(FlightRecorder(tmp_path, "decode"), {"now": 2})
    assert json.loads(path.read_text())["state"] == {"now": 2}, "of the process that had the number before nothing is left"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fail(FlightRecorder(tmp_path / "gone", "prefill"), {})
    (message,) = caplog.messages
    assert message.startswith(
        "invariant of the scheduler failed in commit: a slot is lost; its plans are lost: [Errno 2] No such file or directory:"
    )


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fail(FlightRecorder(None, "prefill"), {})
    assert list(tmp_path.iterdir()) == []


def _check(scheduler: LoggedScheduler) -> None:
    scheduler.table.slots.take()
    scheduler.check()


def _schedule(scheduler: LoggedScheduler) -> None:
    scheduler.table.live["b"].status = Status.PUBLISHING  # still in the queue of those that wait
    scheduler.schedule(0.0)


def _commit(scheduler: LoggedScheduler) -> None:
    scheduler.commit(StepResult(step_id=0, sampled=()))


@pytest.mark.parametrize(("call", "drive"), [("check", _check), ("schedule", _schedule), ("commit", _commit)])
def test_the_state_in_the_file_is_the_schedulers(call: str, drive: Callable[[LoggedScheduler], None], tmp_path: Path) -> None:
    sizes = {"max_model_len": 64, "page_size": 4, "num_pages": 9, "eos_token_ids": ()}
    scheduler = make_scheduler(SchedulerConfig(schedule_log=str(tmp_path / "log.jsonl")), role=Role.UNIFIED, **sizes)
    assert isinstance(scheduler, LoggedScheduler)
    scheduler.add(request("a", (1, 2, 3, 4, 5)), 0.0)
    scheduler.schedule(0.0)
    scheduler.add(request("b", (1,)), 0.0)
    with pytest.raises(AssertionError):
        drive(scheduler)
    scheduler.close_log()
    (path,) = tmp_path.glob("jdisagg-plans-*")
    first = json.loads(path.read_text().splitlines()[0])
    assert first["failed"] == call
    assert (first["state"]["pages"]["total"], len(first["state"]["sequences"])) == (8, 2)
