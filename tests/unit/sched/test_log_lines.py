"""The lines of a schedule log: one per call that may change something, whole, on disk at once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.errors import ConfigError, HandoffLost, InvalidRequest
from jdisagg.core.requests import Output, Role, SamplingParams
from jdisagg.replay import replay
from jdisagg.sched.intake import Limits
from jdisagg.sched.log import LoggedScheduler, make_scheduler
from jdisagg.sched.log_codec import decode, encode
from jdisagg.sched.plan import StepResult
from jdisagg.sched.states import Status
from tests.unit.sched.engine_fake import FakeEngine, expected, request
from tests.unit.sched.peer_fake import PROMPT, arrive, first_of

SIZES: dict[str, Any] = {"max_model_len": 64, "page_size": 4, "num_pages": 20, "eos_token_ids": ()}


def lines(path: Path) -> list[dict[str, Any]]:
    """What is on disk."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def calls(path: Path) -> list[str]:
    """Names of the calls, without the constructor's."""
    return [line["call"] for line in lines(path)[1:]]


def test_a_log_that_its_disk_does_not_take_ends_and_the_scheduler_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(num_pages=20, schedule_log="/dev/full")
    engine.add(request("r1", PROMPT, 3))
    engine.run()
    assert engine.seen["r1"].tokens == expected(PROMPT, 3)
    assert caplog.messages == ["--schedule-log: /dev/full: No space left on device; it ends here"]
    engine.scheduler.close_log()


def same_when_replayed(path: Path) -> bool:
    """The log leads to the results it holds."""
    return replay(path.read_text().splitlines(keepends=True)).difference is None


def test_every_call_is_on_disk_before_the_next_with_its_arguments_and_result(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    config = SchedulerConfig(schedule_log=str(path), max_queue_len=7)
    scheduler = make_scheduler(config, role=Role.DECODE, clock=lambda: 7.25, **SIZES)
    assert isinstance(scheduler, LoggedScheduler)
    head = (
        '{"call":"__init__","args":[{"$":"SchedulerConfig","max_queue_len":7,"schedule_log":'
        + json.dumps(str(path))
        + '}],"kwargs":{"role":{"$":"Role","value":"decode"},"max_model_len":64,"page_size":4,"num_pages":20,'
        + '"eos_token_ids":[]}}\n'
    )
    assert path.read_text() == head

    asked = request("ü", (1, 2), 3)
    scheduler.add(asked, 1.5, remote=True)
    scheduler.peer_ready("ü", False)
    scheduler.peer_ready("ü")
    assert scheduler.compute_locally("ü", 4)
    scheduler.fetch_first("ü", 4)
    assert scheduler.compute_locally("ü", 4)
    plan = scheduler.schedule(2.5)
    nothing = StepResult(step_id=99, sampled=())
    scheduler.commit(nothing)
    error = HandoffLost("gone")
    output = scheduler.fail("ü", error)
    assert output is not None
    assert output.error is error
    scheduler.drain()
    assert scheduler.reset_prefix_cache() == 0
    assert not scheduler.compute_locally("unknown")
    scheduler.cancel("ü")
    assert lines(path)[1:] == [
        {"call": "add", "args": [encode(asked), 1.5], "kwargs": {"remote": True}, "result": None},
        {"call": "peer_ready", "args": ["ü", False], "kwargs": {}, "at_s": 7.25, "result": None},
        {"call": "peer_ready", "args": ["ü"], "kwargs": {}, "at_s": 7.25, "result": None},
        {"call": "compute_locally", "args": ["ü", 4], "kwargs": {}, "at_s": 7.25, "result": True},
        {"call": "fetch_first", "args": ["ü", 4], "kwargs": {}, "at_s": 7.25, "result": None},
        {"call": "compute_locally", "args": ["ü", 4], "kwargs": {}, "at_s": 7.25, "result": True},
        {"call": "schedule", "args": [2.5], "kwargs": {}, "result": encode(plan)},
        {"call": "commit", "args": [encode(nothing)], "kwargs": {}, "at_s": 7.25, "result": []},
        {
            "call": "fail",
            "args": ["ü", {"$": "HandoffLost", "message": "gone"}],
            "kwargs": {},
            "at_s": 7.25,
            "result": encode(output),
        },
        {"call": "drain", "args": [], "kwargs": {}, "at_s": 7.25, "result": None},
        {"call": "reset_prefix_cache", "args": [], "kwargs": {}, "at_s": 7.25, "result": 0},
        {"call": "compute_locally", "args": ["unknown"], "kwargs": {}, "at_s": 7.25, "result": False},
        {"call": "cancel", "args": ["ü"], "kwargs": {}, "at_s": 7.25, "result": None},
    ]
    assert same_when_replayed(path)

    scheduler.close_log()
    scheduler.close_log()
    size = path.stat().st_size
    scheduler.cancel("ü")
    assert path.stat().st_size == size


def test_a_refusal_is_written_with_the_name_of_its_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    asked = request("a", ())
    scheduler = make_scheduler(SchedulerConfig(schedule_log=str(path)), role=Role.UNIFIED, **SIZES)
    assert isinstance(scheduler, LoggedScheduler)
    with pytest.raises(InvalidRequest):
        scheduler.add(asked, 0.5)
    scheduler.close_log()
    assert lines(path)[1] == {"call": "add", "args": [encode(asked), 0.5], "kwargs": {}, "raised": "InvalidRequest"}
    assert same_when_replayed(path)


def test_a_remote_life_is_written_with_the_times_it_was_told(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    engine = FakeEngine(Role.DECODE, schedule_log=str(path))
    engine.now_s = 4.25
    engine.add(request("a", PROMPT, 3), remote=True)
    engine.step()
    (reserved,) = engine.scheduler.take_reserved()
    arrive(engine, reserved, PROMPT)
    engine.run()
    engine.scheduler.close_log()
    assert engine.seen["a"].tokens == expected(PROMPT, 3)
    written = lines(path)
    first = next(line for line in written if line["call"] == "remote_first_token")
    assert (first["args"], first["at_s"]) == (["a", encode(first_of(PROMPT, "a"))], 4.25)
    assert next(line for line in written if line["call"] == "kv_arrived")["args"] == ["a"]
    assert next(line for line in written if line["call"] == "take_reserved")["result"] == [encode(reserved)]
    assert {line["at_s"] if "at_s" in line else line["args"][-1] for line in written[1:]} == {4.25}
    assert same_when_replayed(path)


def test_polls_that_change_nothing_are_not_written_and_those_that_do_are(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    engine = FakeEngine(Role.DECODE, schedule_log=str(path), local_prefill=False, num_pages=8)
    scheduler = engine.scheduler

    def poll() -> None:
        engine.collect(scheduler.expire(engine.now_s))
        engine.step()
        scheduler.take_reserved()
        scheduler.take_retracted()

    for _ in range(3):
        poll()
    assert calls(path) == []
    engine.add(request("over", (1, 2), 1, generated=(3,)))  # complete when it came: expire has its end to tell
    engine.collect(scheduler.expire(0.0))
    assert calls(path) == ["add", "expire"]
    engine.add(request("late", (1, 2), 3, deadline_s=5.0), remote=True, is_open=False)
    poll()  # nothing is due and nothing reserved, but an empty plan might have reserved pages
    assert calls(path)[2:] == ["add", "schedule"]
    engine.now_s = 5.0
    engine.collect(scheduler.expire(5.0))
    assert calls(path)[4:] == ["expire"]
    engine.add(*(request(f"r{i}", PROMPT[:4], 12) for i in range(3)), remote=True)
    engine.step()
    for reserved in scheduler.take_reserved():
        arrive(engine, reserved, PROMPT[:4])
    before = len(calls(path))
    while not scheduler.stats.retractions:
        assert scheduler.table.live, "nobody was retracted"
        engine.tick()
    assert "take_retracted" not in calls(path)[before:]
    (again,) = scheduler.take_retracted()
    assert lines(path)[-1] == {"call": "take_retracted", "args": [], "kwargs": {}, "at_s": 5.0, "result": [encode(again)]}
    scheduler.close_log()
    assert same_when_replayed(path)


def test_the_first_plan_of_an_idle_scheduler_is_written_since_it_moves_the_bound_of_the_queue(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    scheduler = make_scheduler(SchedulerConfig(schedule_log=str(path), max_queue_len=1), role=Role.DECODE, **SIZES)
    assert isinstance(scheduler, LoggedScheduler)
    scheduler.schedule(0.0)
    assert calls(path) == [], "nothing has happened yet"
    for now_s, plans in ((1.0, True), (2.0, False)):  # it was idle before the second time, too
        scheduler.add(request("gone", PROMPT, 3), now_s, remote=True)
        if plans:
            scheduler.schedule(now_s)
        scheduler.cancel("gone")
        for number in range(3):
            scheduler.schedule(now_s + 0.1 * number)
    assert calls(path) == ["add", "schedule", "cancel", "schedule", "add", "cancel", "schedule"]
    for name in ("c", "d"):
        scheduler.add(request(name, PROMPT, 3), 3.0)
    scheduler.close_log()
    assert same_when_replayed(path)


def test_a_poll_that_takes_pins_away_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    engine = FakeEngine(Role.DECODE, schedule_log=str(path), num_pages=8)
    engine.add(request("before", PROMPT[:8], 1))
    engine.run()
    engine.add(request("pins", (*PROMPT[:8], 1), 2), remote=True, is_open=False)
    engine.add(request("long", (9,) * 24, 2))  # 6 of the 5 pages that are free
    engine.tick()
    (again,) = engine.scheduler.take_retracted()
    assert lines(path)[-1] == {"call": "take_retracted", "args": [], "kwargs": {}, "at_s": 0.0, "result": [encode(again)]}
    assert [c.request_id for c in engine.tick().prefill] == ["long"]
    engine.drop("pins")
    engine.run()
    engine.scheduler.close_log()
    assert same_when_replayed(path)


def test_without_a_file_nothing_is_encoded() -> None:
    scheduler = make_scheduler(SchedulerConfig(), role=Role.UNIFIED, **SIZES)
    no_id: Any = object()  # no log line could hold it
    assert scheduler.fail(no_id, HandoffLost("gone")) is None


def test_where_no_directory_can_be_written_to_a_scheduler_does_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    make_scheduler(SchedulerConfig(), role=Role.UNIFIED, **SIZES)
    (message,) = caplog.messages
    assert message.startswith("the last plans before a failed invariant would not be kept: No usable temporary directory")


@pytest.mark.parametrize("value", [Status.WAITING, Limits(role=Role.UNIFIED, max_model_len=1, page_size=1, num_usable_pages=1)])
def test_what_no_call_uses_is_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=f"^a schedule log cannot hold {type(value).__name__}$"):
        encode([value])
    with pytest.raises(KeyError, match=f"unknown type '{type(value).__name__}' in a schedule log"):
        decode({"$": type(value).__name__})


def test_fields_at_their_default_are_left_out() -> None:
    assert "temperature" not in encode(SamplingParams(temperature=float("1")))  # equal is enough
    assert encode(Output(request_id="a", cached_tokens=2)) == {"$": "Output", "request_id": "a", "cached_tokens": 2}


def test_a_log_has_one_writer_and_keeps_what_the_one_before_wrote(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    config = SchedulerConfig(schedule_log=str(path))
    first = make_scheduler(config, role=Role.UNIFIED, **SIZES)
    assert isinstance(first, LoggedScheduler)
    first.cancel("a")
    with pytest.raises(ConfigError, match=r"log.jsonl: another process writes it; name one file for each worker"):
        make_scheduler(config, role=Role.UNIFIED, **SIZES)
    first.cancel("b")
    assert [line["args"] for line in lines(path)[1:]] == [["a"], ["b"]]
    first.close_log()
    second = make_scheduler(config, role=Role.UNIFIED, **SIZES)
    assert isinstance(second, LoggedScheduler)
    second.cancel("c")
    second.close_log()
    assert [line["args"] for line in lines(path)[1:]] == [["c"]]
    assert [line["args"] for line in lines(path.with_name("log.jsonl.old"))[1:]] == [["a"], ["b"]]


def test_a_log_on_a_file_system_without_locks_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(ConfigError, match=r"schedule_log .*log.jsonl cannot be locked: No locks available; name one on a"):
        make_scheduler(SchedulerConfig(schedule_log=str(tmp_path / "log.jsonl")), role=Role.UNIFIED, **SIZES)


@pytest.mark.parametrize("place", ["", "log.jsonl/", "no/such/log.jsonl"])
def test_a_log_that_cannot_be_opened_is_a_bad_configuration(tmp_path: Path, place: str) -> None:
    (tmp_path / "log.jsonl").mkdir()
    config = SchedulerConfig(schedule_log=f"{tmp_path}/{place}")
    with pytest.raises(ConfigError, match=r"--schedule-log: .* cannot be written: .*; name another file"):
        make_scheduler(config, role=Role.UNIFIED, **SIZES)
