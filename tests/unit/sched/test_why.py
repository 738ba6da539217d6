"""Why a request waited, from the real scheduler's state; and its life as `jdisagg.replay --why` tells it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jdisagg.core.errors import HandoffLost
from jdisagg.core.requests import EngineRequest, FinishReason, Output, Role
from jdisagg.replay import main, replay
from jdisagg.sched.explain import Cause
from jdisagg.sched.log_codec import encode
from jdisagg.sched.states import Status
from tests.unit.sched.engine_fake import FakeEngine, next_token, request

TICK_S = 0.004
Tell = Callable[..., list[str]]


def finish(engine: FakeEngine) -> None:
    """To the end, 4 ms a tick."""
    while not (engine.scheduler.is_idle() and not engine.in_flight):
        engine.tick()
        engine.now_s += TICK_S
        assert engine.now_s < 10, "it does not end"


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


def test_pages_short_are_counted_as_the_gate_counts_and_who_freed_them_is_named(tell: Tell) -> None:
    def drive(engine: FakeEngine) -> None:
        engine.add(request("old", tuple(range(1, 17)), 8))
        engine.tick()
        engine.now_s += TICK_S
        engine.add(request("new", tuple(range(2, 30)), 4))
        finish(engine)

    story = tell(drive, "new", num_pages=12, caching=False, reserved_decode_tokens=8)
    # 11 pages; old: 16 + 7 tokens = 6 pages promised, 4 taken at once, the 5th with its first decode; new: 31 tokens = 8 pages
    assert story[0] == "request new: 28 prompt tokens, at most 4 new; added at 0.004 s"
    assert story[1] == (
        "+0 ms      waited 32 ms: 3 pages short (needs 8, 6 free, 1 promised to admitted requests); "
        "at last 3 pages short (needs 8, 5 free), freed when request old ended"
    )
    assert story[2] == "+32 ms     prefilled in 2 chunks: steps 8-9, 28 tokens"
    assert story[3] == "+40 ms     decoded in 3 steps: steps 10-12, 3 tokens"
    assert story[4] == "+52 ms     finished: length, 4 tokens; queue 32 ms + prefill 8.0 ms + decode 12 ms = 52 ms"


def test_slots_and_the_spent_token_budget_are_named(tell: Tell) -> None:
    def two(engine: FakeEngine) -> None:
        engine.add(request("a", (1, 2), 5), request("b", (3, 4), 5))
        finish(engine)

    assert tell(two, "b", max_num_seqs=1)[1] == "+0 ms      waited 24 ms: no slot, all 1 taken, freed when request a ended"

    def long(engine: FakeEngine) -> None:
        engine.add(request("a", tuple(range(1, 41)), 5), request("b", tuple(range(2, 22)), 5))
        finish(engine)

    story = tell(long, "b")
    assert story[1] == "+0 ms      waited 8.0 ms: token budget of 16 spent by 16 prompt tokens of request a"
    assert story[2] == "+8.0 ms    prefilled in 2 chunks: steps 2-3, 20 tokens"


def test_a_request_behind_one_that_lacks_pages_says_so(tell: Tell) -> None:
    def drive(engine: FakeEngine) -> None:
        engine.add(request("old", tuple(range(1, 17)), 8))
        engine.tick()
        engine.now_s += TICK_S
        engine.add(request("big", tuple(range(2, 30)), 4), request("small", (9,), 2))
        finish(engine)

    story = tell(drive, "small", num_pages=12, caching=False, reserved_decode_tokens=8, max_bypass=0)
    assert story[1].startswith("+0 ms      waited 32 ms: behind request big, 3 pages short (needs 8, 6 free")


def test_who_took_the_pages_of_a_preempted_request_is_named(tell: Tell) -> None:
    def drive(engine: FakeEngine) -> None:
        engine.add(*(request(f"r{i}", (i + 1,) * 4, 12) for i in range(3)))
        finish(engine)

    story = tell(drive, "r2", num_pages=8)
    assert "+20 ms     preempted in step 5 for request r1 (older), 2 pages" in story
    assert "+24 ms     waited 12 ms: 2 pages short (needs 3, 1 free)" in story
    assert story[-1].endswith("queue 32 ms + prefill 8.0 ms + decode 44 ms = 84 ms")
    own = tell(drive, "r1", num_pages=8)
    assert "+36 ms     preempted in step 9 for its own next token: no page was free, 3 pages" in own


def first_token(asked: EngineRequest) -> Output:
    return Output(request_id=asked.request_id, token_ids=(next_token(asked.prompt_token_ids),))


def test_the_life_of_a_remote_request_has_its_peer_and_its_transfer(tell: Tell) -> None:
    asked = request("a", (1, 2, 3, 4, 5), 3)

    def drive(engine: FakeEngine) -> None:
        scheduler = engine.scheduler
        engine.add(asked, remote=True, is_open=False)
        engine.tick()
        engine.now_s = 0.010
        scheduler.peer_ready("a")
        engine.tick()
        engine.now_s = 0.020
        (reserved,) = scheduler.take_reserved()
        engine.collect([scheduler.remote_first_token("a", first_token(asked), engine.now_s)])
        engine.now_s = 0.050
        engine.device.import_tokens(reserved.page_table, asked.prompt_token_ids, 0, 5)
        scheduler.kv_arrived("a", engine.now_s)
        engine.now_s = 0.060
        finish(engine)

    assert tell(drive, "a", Role.DECODE) == [
        "request a: 5 prompt tokens, at most 3 new; added at 0.000 s",
        "+0 ms      waited 10 ms: its prefill worker has not begun with it",
        "+10 ms     its prefill worker has begun",
        "+10 ms     got 2 pages; KV of tokens [0, 5) has to come",
        "+20 ms     first token from its prefill worker",
        "+50 ms     its KV is complete",
        "+50 ms     waited 10 ms for the next step",
        "+60 ms     decoded in 2 steps: steps 0-1, 2 tokens",
        "+68 ms     finished: length, 3 tokens; queue 10 ms + prefill 10 ms + transfer 30 ms + decode 18 ms = 68 ms",
    ]


def test_retraction_failure_and_cancel_are_told(tell: Tell) -> None:
    def start(engine: FakeEngine) -> None:
        for name in ("a", "b"):
            asked = request(name, (1, 2, 3, 4), 12)
            engine.add(asked, remote=True)
            engine.tick()
            (reserved,) = engine.scheduler.take_reserved()
            engine.collect([engine.scheduler.remote_first_token(name, first_token(asked), engine.now_s)])
            engine.device.import_tokens(reserved.page_table, asked.prompt_token_ids, 0, 4)
            engine.scheduler.kv_arrived(name, engine.now_s)

    def retract(engine: FakeEngine) -> None:
        start(engine)
        while not engine.scheduler.take_retracted():
            engine.tick()
            engine.now_s += TICK_S
        engine.collect([output for output in (engine.scheduler.fail("b", HandoffLost("gone")),) if output])
        engine.scheduler.cancel("a")
        while not engine.scheduler.is_idle():
            engine.tick()

    story = tell(retract, "b", Role.DECODE, num_pages=7, caching=False, local_prefill=False)
    assert any("  retracted in step" in line and "for request a (older)" in line for line in story), story
    assert "failed: HandoffLost: gone, " in story[-1]
    cancelled = tell(retract, "a", Role.DECODE, num_pages=7, caching=False, local_prefill=False)
    assert "cancelled while running" in cancelled[-1]


def test_the_prefill_role_ends_with_the_hand_over(tell: Tell) -> None:
    def drive(engine: FakeEngine) -> None:
        engine.add(request("a", tuple(range(1, 21)), 5))
        for _ in range(4):
            engine.tick()
            engine.now_s += TICK_S
        assert engine.scheduler.counts()["publishing"] == 1
        engine.now_s = 0.100
        engine.scheduler.expire(engine.now_s)
        engine.scheduler.schedule(engine.now_s)
        engine.scheduler.release("a")
        finish(engine)

    story = tell(drive, "a", Role.PREFILL)
    assert story[1] == "+0 ms      prefilled in 2 chunks: steps 0-1, 20 tokens"
    assert story[-1].startswith("+100 ms    its KV was handed over while publishing, 1 token; queue 0 ms + prefill")
    assert story[-1].endswith("= 100 ms")


def test_the_end_of_a_hand_over_is_not_taken_for_the_coming_of_the_next_request(tell: Tell) -> None:
    def drive(engine: FakeEngine) -> None:
        engine.add(request("a", tuple(range(1, 9)), 5))
        while engine.scheduler.counts()["publishing"] == 0:
            engine.tick()
        engine.now_s = 0.010
        engine.scheduler.release("a")
        engine.now_s = 2.0  # nothing to do until then
        engine.add(request("b", tuple(range(2, 9)), 5))
        engine.tick()
        engine.scheduler.cancel("b")
        finish(engine)

    assert tell(drive, "a", Role.PREFILL)[-1].endswith("= 10 ms")


def test_a_prompt_that_borrowed_has_given_up_no_prefill_worker(tell: Tell) -> None:
    def drive(engine: FakeEngine) -> None:
        engine.add(request("a", tuple(range(1, 21)), 5))
        engine.scheduler.fetch_first("a", 16)
        engine.tick()
        engine.now_s = 0.020
        engine.tick()
        engine.scheduler.compute_locally("a")
        while engine.scheduler.counts()["publishing"] == 0:
            engine.tick()
        engine.scheduler.release("a")
        finish(engine)

    story = tell(drive, "a", Role.PREFILL)
    assert story[1].endswith("KV of its first tokens is fetched from the decode worker before it is computed")
    assert story[3] == "+20 ms     what could be fetched is here, the rest is to be computed"
    assert not any("prefill worker" in line for line in story)


def test_a_prompt_that_gives_its_pages_to_others_says_so(tell: Tell) -> None:
    def drive(engine: FakeEngine) -> None:
        engine.add(request("a", tuple(range(1, 21)), 5))
        while engine.scheduler.counts()["publishing"] == 0:
            engine.tick()
        engine.now_s = 0.020
        assert engine.scheduler.park(("a",)) == "a"
        engine.seen.clear()
        for engine.now_s in (0.020, 0.050):
            engine.tick()
        engine.scheduler.unpark("a")
        while engine.scheduler.counts()["publishing"] == 0:
            engine.tick()
        engine.now_s = 0.100
        engine.tick()
        engine.scheduler.release("a")
        finish(engine)

    story = tell(drive, "a", Role.PREFILL, caching=False)
    assert story[1:3] == [
        "+0 ms      prefilled in 2 chunks: steps 0-1, 20 tokens",
        "+20 ms     its receiver has no memory yet: its pages go to waiting prompts",
    ]
    assert story[3] == "+20 ms     waited 30 ms: its receiver has no memory for its KV; waiting prompts got its pages"
    assert story[4] == "+50 ms     its receiver has memory: to be computed again"
    assert story[5].startswith("+50 ms     prefilled in 2 chunks: steps 3-4, 20 tokens")
    assert story[6] == (
        "+100 ms    its KV was handed over while publishing, 1 token; queue 30 ms + prefill 0 ms + transfer 70 ms = 100 ms"
    )


@pytest.mark.parametrize("seed", range(16))
def test_nothing_is_passed_over_without_a_reason_that_the_tables_confirm(seed: int) -> None:
    """Random loads on a small pool: every request that gets nothing of a step has a cause."""
    draw = random.Random(seed)
    rules: dict[str, Any] = {
        "scheduling_policy": draw.choice(["fcfs", "priority", "prefill-first"]),
        "safety_margin": draw.choice([0.0, 0.0, 0.3]),
        "max_num_kv_read_tokens": draw.choice([0, 0, 40]),
        "num_scheduler_steps": draw.choice([1, 3]),
        "host_tokens": draw.choice([0, 100]),
        "max_bypass": draw.choice([0, 1, 16]),
    }
    if draw.random() < 0.3:
        rules |= {"enable_chunked_prefill": False, "max_model_len": 40, "max_num_batched_tokens": 40}
    engine = FakeEngine(num_pages=draw.choice([12, 20]), max_num_seqs=draw.choice([2, 4]), reserved_decode_tokens=6, **rules)
    scheduler, causes, added = engine.scheduler, set[Cause](), 0
    for _ in range(250):
        if draw.random() < 0.3 and added < 60:
            prompt = tuple(draw.randrange(1, 4) for _ in range(draw.randrange(1, 25)))
            tokens, group = draw.randrange(1, 12), draw.choice(["", f"g{added}"])
            for _ in range(3 if group else 1):
                engine.add(request(f"r{added}", prompt, tokens, fork_group=group, priority=draw.randrange(3)))
                added += 1
        plan = engine.step()
        before = scheduler.snapshot()
        for sequence in list(scheduler.table.live.values()):
            wait = scheduler.why_not(sequence.request_id)
            worked = sequence.slot in plan.decode or any(c.request_id == sequence.request_id for c in plan.prefill)
            if worked and sequence.status is Status.RUNNING:
                assert wait is None
            elif sequence.status is Status.WAITING:
                assert wait is not None
            if wait is not None:
                assert wait.cause is not Cause.UNEXPLAINED, (wait, scheduler.snapshot())
                assert (wait.cause is Cause.SLOT) <= (scheduler.table.slots.num_free == 0)
                spent = plan.num_tokens == engine.config.max_num_batched_tokens or not engine.config.enable_chunked_prefill
                assert (wait.cause is Cause.BUDGET) <= spent
                causes.add(wait.cause)
        assert scheduler.snapshot() == before, "asking changed something"
        if len(engine.in_flight) > 1 or plan.is_empty:
            engine.commit_one()
    assert len(causes) >= 2
    engine.run()


def test_an_unknown_request_gets_the_nearest_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    engine = FakeEngine(schedule_log=str(path))
    engine.add(request("cmpl-17/0", (1, 2), 2), request("cmpl-18/0", (1, 2), 2), request("other", (1,), 1))
    engine.run()
    engine.scheduler.close_log()
    assert main([str(path), "--why", "cmpl-19/0"]) == 2
    error = capsys.readouterr().err
    assert "no request 'cmpl-19/0' among the 3 of the log; the nearest: " in error
    assert "cmpl-17/0" in error
    assert "cmpl-18/0" in error
    assert main([str(path), "--why", "cmpl-18/0"]) == 0
    assert capsys.readouterr().out.startswith("request cmpl-18/0: 2 prompt tokens")


def test_the_id_a_client_was_given_tells_all_choices_and_no_other_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    engine = FakeEngine(schedule_log=str(path))
    engine.add(*(request(name, (1, 2), 2) for name in ("cmpl-17/0", "cmpl-17/1", "cmpl-171/0", "cmpl-17/1#4")))
    engine.run()
    engine.scheduler.close_log()
    assert main([str(path), "--why", "cmpl-17"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("request ")]
    assert [line.split(":")[0] for line in told] == ["request cmpl-17/0", "request cmpl-17/1", "request cmpl-17/1#4"]
    assert main([str(path), "--why", "cmpl-17/1"]) == 0
    assert capsys.readouterr().out.count("request cmpl-17/1") == 2


def test_a_log_of_a_fleet_is_found_by_its_workers_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.decode-0").write_text("")
    assert main([str(tmp_path / "log")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'log'}: no such file; there are log.decode-0\n"
    assert main([str(tmp_path / "other")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'other'}: no such file\n"


def test_a_damaged_log_is_told_up_to_the_line_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    engine = FakeEngine(schedule_log=str(path))
    engine.add(request("a", (1, 2), 6))
    engine.run()
    engine.scheduler.close_log()
    lines = path.read_text().splitlines(keepends=True)

    def damaged(text: str) -> tuple[int, str, str]:
        path.write_text(text)
        status = main([str(path), "--why", "a"])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    status, out, error = damaged("".join(lines[:6]) + lines[6][:-9])
    assert (status, "line 7: cut off before its end" in error) == (0, True)
    assert "where the log ends; queue 0 ms" in out
    broken = {
        "not JSON": "{nonsense}\n",
        "'explode' is no call": '{"call":"explode","args":[],"kwargs":{}}\n',
        "'__class__' is no call": '{"call":"__class__","args":[],"kwargs":{}}\n',
        "KeyError": '{"call":"schedule"}\n',
        "unknown type 'Unheard'": '{"call":"commit","args":[{"$":"Unheard"},0.0],"kwargs":{}}\n',
        "schedule without a time": '{"call":"schedule","args":[],"kwargs":{}}\n',
        "at_s is 'soon'": '{"call":"drain","args":[],"kwargs":{},"at_s":"soon"}\n',
        "TypeError": "[1,2]\n",
    }
    for said, line in broken.items():
        status, out, error = damaged("".join([*lines[:6], line, *lines[6:]]))
        assert status == 2, said
        assert "line 7: " in error
        assert said in error
        assert "6 calls" not in out
        assert out.startswith("request a: ")
    status, _, error = damaged(json.dumps({"call": "__init__", "args": [encode(engine.config)], "kwargs": {"role": 3}}) + "\n")
    assert (status, "line 1: no scheduler can be made of it" in error) == (2, True)
    status, _, error = damaged("")
    assert (status, "line 1: not a schedule log" in error) == (2, True)


def test_live_state_says_what_each_request_waits_for() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.add(request("a", (1, 2), 5), request("b", (3, 4), 5))
    engine.tick()
    engine.add(request("c", (5,), 1))  # no plan has seen it
    waits = {s["request_id"]: s["waits_for"] for s in engine.scheduler.snapshot()["sequences"]}
    assert waits["a"] is None
    assert waits["b"] == "no slot, all 1 taken"
    engine.run()
    assert engine.seen["a"].last.finish is FinishReason.LENGTH
