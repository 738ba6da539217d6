"""The schedule log and its replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jdisagg.core import errors
from jdisagg.core.config import SchedulerConfig
from jdisagg.core.errors import HandoffLost, InvalidRequest, Overloaded, RequestError
from jdisagg.core.requests import FinishReason, Output, Provenance, Role, TokenLogprob
from jdisagg.replay import main, replay
from jdisagg.sched.flight_recorder import NUM_RECENT_PLANS
from jdisagg.sched.log import LoggedScheduler, make_scheduler
from jdisagg.sched.log_codec import decode, encode
from jdisagg.sched.plan import Sampled, StepResult
from tests.unit.sched.engine_fake import FakeEngine, expected, request


def _ends_a_request(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, RequestError)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log with admissions, preemption, a refusal, a cancel, a failure and an expiry."""
    path = tmp_path / "schedule.jsonl"
    engine = FakeEngine(num_pages=8, schedule_log=str(path))
    engine.add(*(request(f"r{i}", (i + 1,) * 4, 12) for i in range(3)), request("late", (1, 2), 3, deadline_s=0.5))
    with pytest.raises(InvalidRequest):
        engine.add(request("huge", (1,) * 100, 3))
    engine.tick()
    engine.now_s = 1.0
    engine.tick()
    engine.scheduler.cancel("r1")
    engine.scheduler.fail("r2", HandoffLost("for the log"))
    engine.add(request("r3", (4,) * 4, 12))
    engine.run()
    engine.scheduler.close_log()
    assert engine.seen["r3"].tokens == expected((4,) * 4, 12)
    return path


@pytest.mark.covers("V21")
def test_a_log_replays_to_the_same_plans(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log.open() as lines:
        report = replay(lines)
    assert report.difference is None
    assert report.num_plans > 10
    assert main([str(log)]) == 0
    assert "all the same" in capsys.readouterr().out


def test_a_prompt_that_was_refused_a_place_which_was_kept_for_others_is_refused_once_more_by_a_replay(tmp_path: Path) -> None:
    """A log knows no hand-offs: who decides by them says it in the call."""
    path = tmp_path / "schedule.jsonl"
    engine = FakeEngine(Role.PREFILL, schedule_log=str(path), max_queue_len=2)
    engine.add(*(request(f"r{i}", (i + 1,) * 4, 1) for i in range(5)))  # four find a slot
    with pytest.raises(Overloaded, match="the last places are for others"):
        engine.add(request("refused", (9,) * 4, 1), kept=1)
    engine.add(request("r5", (6,) * 4, 1))
    engine.tick()
    engine.scheduler.close_log()
    with path.open() as lines:
        report = replay(lines)
    assert (report.difference, report.num_plans) == (None, 1)


def test_the_first_difference_is_named_with_its_line(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = log.read_text().splitlines()
    index = next(i for i, line in enumerate(lines) if json.loads(line)["call"] == "schedule" and '"decode"' in line)
    changed = json.loads(lines[index])
    changed["result"]["decode"] = [3]
    lines[index] = json.dumps(changed)
    log.write_text("\n".join(lines) + "\n")
    assert main([str(log)]) == 1
    assert f"{log}:{index + 1}: schedule differs" in capsys.readouterr().out


def test_a_line_cut_off_by_a_crash_is_left_out(log: Path) -> None:
    text = log.read_text()
    report = replay(text[:-10].splitlines(keepends=True))
    assert report.difference is None
    assert report.num_calls == text.count("\n") - 2


def test_what_is_not_a_log_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"call":"add"}\n')
    assert main([str(path)]) == 2
    assert main([str(tmp_path / "absent.jsonl")]) == 2


def test_values_come_back_from_json_as_they_were() -> None:
    output = Output(
        request_id="a",
        token_ids=(1, 2),
        logprobs=(TokenLogprob(1, -0.1, ((1, -0.1), (5, -2.5))),),
        prompt_logprobs=(None, TokenLogprob(3, -1.0)),
        finish=FinishReason.STOP,
        stop_token_id=0,
        provenance=Provenance(recoveries=("replay",)),
    )
    result = StepResult(
        step_id=3, sampled=(Sampled(slot=0, token_ids=(7,), bad="NaN"),), prompt_logprobs={2: (TokenLogprob(1, -1.0),)}
    )
    values = (output, result, request("r", (1, 2), logit_bias=((3, 0.5),)), Role.DECODE, None, SchedulerConfig())
    assert decode(json.loads(json.dumps(encode(values)))) == values
    with pytest.raises(TypeError):
        encode(object())
    with pytest.raises(KeyError):
        decode({"$": "Unheard"})


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if _ends_a_request(kind)])
def test_every_error_that_ends_a_request_comes_back_from_json(kind: type[RequestError]) -> None:
    error = decode(json.loads(json.dumps(encode(kind("why")))))
    assert (type(error), error.message) == (kind, "why")


def test_the_last_plans_are_kept_without_a_file() -> None:
    sizes = {"max_model_len": 2000, "page_size": 4, "num_pages": 500, "eos_token_ids": ()}
    scheduler = make_scheduler(SchedulerConfig(), role=Role.UNIFIED, **sizes)
    assert isinstance(scheduler, LoggedScheduler)
    scheduler.add(request("a", (1,), 400), 0.0)
    for step in range(300):
        plan = scheduler.schedule(0.0)
        assert plan.step_id == step
        scheduler.commit(StepResult(step_id=step, sampled=(Sampled(slot=0, token_ids=(1,)),)))
    assert len(scheduler.recorder.plans) == NUM_RECENT_PLANS
    assert scheduler.recorder.plans[-1][1].step_id == 299
    scheduler.close_log()
