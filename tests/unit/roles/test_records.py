"""Events, phases and stages: what is told of a request and of a tick, and that it adds up."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jdisagg.core.errors import DeadlineExceeded, Overloaded, Unavailable
from jdisagg.core.metrics import Metrics
from jdisagg.core.phases import Phase, Phases
from jdisagg.core.requests import EngineRequest, FinishReason, Output, Role
from jdisagg.handoff.events import PeerOpened
from jdisagg.handoff.messages import Accepted, ChunkReady, HandoffId, Open, Refused
from jdisagg.roles import engine_loop
from jdisagg.roles.compute import ComputeSide
from jdisagg.roles.inbox import Cancel, Message, Submit
from jdisagg.roles.record import MAX_EVENTS, Event, RequestRecord
from jdisagg.roles.stages import Stage
from jdisagg.transfer.base import PieceFailed
from tests.unit.roles.engine import Engine
from tests.unit.roles.network_fake import FakeFetcher
from tests.unit.roles.world import World
from tests.unit.sched.engine_fake import expected, request

PHASES = ("queue", "prefill", "transfer", "decode")
PROMPT = tuple(range(3, 22))
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "IDLE_WAIT_S", 0.0)


def read(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"jdisagg_{name}", labels) or 0.0


def phase_sum(metrics: Metrics) -> float:
    return sum(read(metrics, f"request_{phase}_seconds_sum") for phase in PHASES)


class Unified:
    """A unified engine stepped by hand, 10 ms a tick."""

    def __init__(self, num_pages: int = 24, slow_request_s: float = 1e9, **settings: Any) -> None:
        self.engine = Engine(Role.UNIFIED, num_pages, True, **settings)
        self.engine.run(ComputeSide(self.engine.scheduler), slow_request_s=slow_request_s)
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


@pytest.mark.covers("V39")
def test_events_of_a_preempted_request_are_shown_live_and_logged_when_it_took_long(caplog: pytest.LogCaptureFixture) -> None:
    unified = Unified(num_pages=8, slow_request_s=0.15, reserved_decode_tokens=0)
    for index in range(3):
        unified.submit(replace(request(f"r{index}", (index + 1,) * 4, 12), traceparent=TRACE if index == 2 else ""))
    unified.submit(request("quick", (9,), 1))
    live: dict[str, Any] = {}
    with caplog.at_level(logging.INFO, "jdisagg.roles.record"):
        for _ in range(100):
            unified.tick()
            live |= unified.requests()
    assert unified.engine.metrics.engine.preemptions._value.get() >= 1
    assert unified.requests() == {}
    shown = live["r2"]
    names = [event["event"] for event in shown["events"]]
    assert names[:4] == ["queued", "scheduled", "preempted", "resumed"]
    times = [event["at_s"] for event in shown["events"]]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert shown["traceparent"] == TRACE
    lines = {record.args[0]: record.getMessage() for record in caplog.records if isinstance(record.args, tuple)}
    assert "quick" not in lines
    assert f"request r2 (traceparent {TRACE}): length, 12 tokens in 0." in lines["r2"]
    assert "queued +0.000, scheduled +0.000, preempted +" in lines["r2"]
    assert "finished +0." in lines["r2"]
    assert [output.finish for output in unified.outputs if output.finish] == [FinishReason.LENGTH] * 4


@pytest.mark.covers("V39")
def test_the_trace_context_goes_from_the_decode_worker_to_its_prefill_worker(caplog: pytest.LogCaptureFixture) -> None:
    world = World(local_prefill=False, slow_request_s=0.0)
    with caplog.at_level(logging.INFO, "jdisagg.roles.record"):
        world.submit(replace(request("a", PROMPT, 6), traceparent=TRACE))
        world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)
    prefill, decode = (record.getMessage() for record in caplog.records)
    assert f"(traceparent {TRACE}): handed over, 1 tokens in" in prefill
    assert f"request a (traceparent {TRACE}): length, 6 tokens in" in decode
    assert "queued +0.000, scheduled +" in prefill
    assert "transfer" in prefill
    assert "decode" not in prefill
    for phase in PHASES:
        assert f"{phase} " in decode


@pytest.mark.parametrize("seed", range(4))
def test_phases_add_up_on_both_workers_whatever_happens(seed: int) -> None:
    """Cancels, deadlines, cut streams, lost pieces, retractions: every request's phases are its whole time, once."""
    draw = random.Random(seed)
    world = World(local_prefill=seed % 2 == 0, decode_pages=16, prefill_pages=14)
    for index in range(24):
        deadline_s = world.now_s + draw.choice([0.05, 1e6, 1e6, 1e6])
        prompt = tuple(draw.randrange(1, 9) for _ in range(draw.randrange(1, 24)))
        world.submit(request(f"r{index}", prompt, draw.randrange(1, 12), deadline_s=deadline_s))
        for _ in range(draw.randrange(6)):
            world.tick()
        if draw.random() < 0.2:
            world.cancel(f"r{draw.randrange(index + 1)}")
        if draw.random() < 0.2:
            world.network.lose_next += 1
        if draw.random() < 0.2 and world.wire.open_streams:
            world.wire.cut(draw.choice(list(world.wire.open_streams)), "dead")
    world.settle()
    for engine in (world.prefill, world.decode):
        metrics = engine.metrics
        assert read(metrics, "request_seconds_count") == read(metrics, "request_queue_seconds_count") > 0
        assert phase_sum(metrics) == pytest.approx(read(metrics, "request_seconds_sum"), abs=1e-9)
    ended = sum(sample.value for family in world.decode.metrics.requests.finished.collect() for sample in family.samples)
    assert read(world.decode.metrics, "request_seconds_count") == ended == 24


@pytest.mark.parametrize("end", ["ended", "preempted", "given_up", "arrived"])
def test_time_between_a_peers_token_and_its_kv_is_transfer_however_it_ends(end: str) -> None:
    phases = Phases(0.0)
    phases.started(1.0)
    phases.awaits_kv()
    phases.produced(3.0)
    if end == "ended":
        phases.ended(10.0)
        assert phases.seconds == {Phase.QUEUE: 1.0, Phase.PREFILL: 2.0, Phase.TRANSFER: 7.0}
        return
    if end == "arrived":
        phases.kv_arrived(10.0)
    elif end == "preempted":
        phases.preempted(10.0)
    else:
        phases.kv_given_up(10.0)
    assert phases.phase is (Phase.DECODE if end == "arrived" else Phase.QUEUE)
    phases.started(11.0)
    if end == "given_up":
        phases.produced(12.0)
    phases.ended(14.0)
    tail = {
        "arrived": {Phase.QUEUE: 1.0, Phase.PREFILL: 2.0, Phase.DECODE: 4.0},
        "preempted": {Phase.QUEUE: 2.0, Phase.PREFILL: 5.0},
        "given_up": {Phase.QUEUE: 2.0, Phase.PREFILL: 3.0, Phase.DECODE: 2.0},
    }
    assert phases.seconds == {Phase.TRANSFER: 7.0} | tail[end]


def test_a_life_whose_kv_never_came_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    world, clock = World(local_prefill=True, slow_request_s=0.0), iter(range(1, 1000))

    def stall(self: FakeFetcher, handoff: HandoffId, peer: str, ready: ChunkReady, deadline_s: float) -> None:
        world.now_s += 5 * next(clock)  # five seconds, ten, ..
        self._inbox.post(PieceFailed(handoff=handoff, ready=ready, reason="stalled"))

    monkeypatch.setattr(FakeFetcher, "fetch", stall)
    with caplog.at_level(logging.INFO, "jdisagg.roles.record"):
        world.submit(request("a", PROMPT, 6))
        world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)
    assert read(world.decode.metrics, "request_transfer_seconds_sum") > 4.0
    assert read(world.decode.metrics, "request_decode_seconds_sum") < 1.0


def test_the_prefill_role_has_its_own_phases() -> None:
    world = World(local_prefill=False)
    for name in ("a", "b"):
        world.submit(request(name, (*PROMPT, ord(name)), 6))
    world.settle()
    metrics = world.prefill.metrics
    counts = {phase: read(metrics, f"request_{phase}_seconds_count") for phase in PHASES}
    assert counts == {"queue": 2, "prefill": 2, "transfer": 2, "decode": 0}
    assert read(metrics, "request_prefill_seconds_sum") > 0
    assert read(metrics, "request_transfer_seconds_sum") > 0
    assert read(metrics, "generated_tokens_total") == 0  # counted where they are delivered
    assert world.prefill.loop is not None
    assert world.prefill.loop.snapshot()["handoff"]["requests"] == {}


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


@pytest.mark.covers("V38")
def test_stages_of_ticks_and_phases_of_requests_add_up_to_the_time_that_passed() -> None:
    clock = Ticking()
    engine = Engine(Role.UNIFIED, 9, True, reserved_decode_tokens=0)
    side = ComputeSide(engine.scheduler)
    seconds = dict(zip(Stage, (0.1, 0.002, 0.003, 0.005, 0.007, 0.011, 0.013, 0.017), strict=True))
    drain, idle_s, inbox_s = engine.inbox.drain, seconds[Stage.IDLE], seconds[Stage.INBOX]

    def slow_drain(wait_s: float) -> list[Message]:
        clock.now_s += idle_s if loop._was_idle else inbox_s
        return drain(wait_s)

    engine.inbox.drain = slow_drain  # type: ignore[method-assign]
    side.before_step = clock.slow(side.before_step, seconds[Stage.PEERS])  # type: ignore[method-assign]
    engine.scheduler.schedule = clock.slow(engine.scheduler.schedule, seconds[Stage.PLAN])  # type: ignore[method-assign]
    engine.runner.dispatch = clock.slow(engine.runner.dispatch, seconds[Stage.DISPATCH])  # type: ignore[method-assign]
    engine.runner.collect = clock.slow(engine.runner.collect, seconds[Stage.WAIT])  # type: ignore[method-assign]
    engine.scheduler.commit = clock.slow(engine.scheduler.commit, seconds[Stage.COMMIT])  # type: ignore[method-assign]
    engine.streams.deliver = clock.slow(engine.streams.deliver, seconds[Stage.DELIVER])  # type: ignore[method-assign]
    engine.run(side, clock=clock)
    loop = engine.loop
    assert loop is not None
    came_s: dict[str, float] = {}
    took_s: dict[str, float] = {}

    def sink(outputs: list[Output]) -> None:
        took_s.update({o.request_id: clock.now_s - came_s[o.request_id] for o in outputs if o.finish})

    def host_s() -> float:
        return sum(
            read(engine.metrics, "tick_seconds_total", stage=s.value) for s in Stage if s not in (Stage.IDLE, Stage.WAIT)
        )

    def tick() -> bool:
        """Whether a step was dispatched."""
        before_s = host_s()
        dispatched = engine.tick(clock.now_s) and loop._pipeline.in_flight is not None
        if dispatched:
            in_dispatching_ticks.append(host_s() - before_s)
        return dispatched

    in_dispatching_ticks: list[float] = []
    num_ticks = num_steps = num_idle = 0
    for index in range(5):
        name = f"r{index}"
        engine.inbox.post(Submit(request(name, tuple(range(1, 5 + 2 * index)), 12), sink))
        for _ in range(2):
            num_idle += loop._was_idle
            came_s.setdefault(name, clock.now_s)
            num_steps += tick()
            num_ticks += 1
    while not engine.scheduler.is_idle() or loop.num_unfinished:
        num_idle += loop._was_idle
        num_steps += tick()
        num_ticks += 1
    metrics = engine.metrics
    measured = {stage: read(metrics, "tick_seconds_total", stage=stage.value) for stage in Stage}
    counts = {
        Stage.IDLE: num_idle, Stage.INBOX: num_ticks - num_idle, Stage.PEERS: num_ticks, Stage.PLAN: num_ticks,
        Stage.DISPATCH: num_steps, Stage.WAIT: num_steps, Stage.COMMIT: num_steps, Stage.DELIVER: num_ticks,
    }  # fmt: skip
    assert measured == pytest.approx({stage: seconds[stage] * count for stage, count in counts.items()})
    assert sum(measured.values()) == pytest.approx(clock.now_s - 50.0)
    assert read(metrics, "host_overhead_seconds_count") == num_steps
    assert read(metrics, "host_overhead_seconds_sum") == pytest.approx(sum(in_dispatching_ticks))
    assert metrics.engine.preemptions._value.get() > 0
    assert len(took_s) == 5
    assert read(metrics, "request_seconds_count") == 5
    assert phase_sum(metrics) == pytest.approx(read(metrics, "request_seconds_sum"))
    # a client has its last token a delivery, and the commit before it, after the engine marked it
    slack_s = seconds[Stage.DELIVER] + seconds[Stage.COMMIT] + seconds[Stage.PEERS] + seconds[Stage.IDLE]
    assert read(metrics, "request_seconds_sum") == pytest.approx(sum(took_s.values()), abs=5 * slack_s)


def test_a_request_that_is_cancelled_or_late_counts_its_time_in_the_phase_it_was_in() -> None:
    unified = Unified(max_num_seqs=1)
    unified.submit(request("runs", (1, 2), 20))
    unified.submit(request("late", (1, 2), 20, deadline_s=unified.now_s + 0.045))
    unified.submit(request("cancelled", (1, 2), 20))
    for _ in range(6):
        unified.tick()
    unified.engine.inbox.post(Cancel("cancelled", 0))
    unified.tick()
    metrics = unified.engine.metrics
    assert read(metrics, "request_queue_seconds_count") == 2
    assert read(metrics, "request_queue_seconds_sum") == pytest.approx(0.04 + 0.06, abs=0.001)
    assert read(metrics, "request_decode_seconds_count") == 0
    assert [type(output.error) for output in unified.outputs if output.finish] == [DeadlineExceeded]
    unified.run()


def test_of_endless_events_the_first_and_the_latest_are_kept() -> None:
    record = RequestRecord(Metrics(), request("a", (1,), 1), 0.0)
    for step in range(200):
        record.scheduled(float(step))
        record.preempted(step + 0.5)
    shown = record.snapshot()
    assert len(shown["events"]) == MAX_EVENTS
    assert [event["event"] for event in shown["events"][:2]] == [Event.QUEUED.value, Event.SCHEDULED.value]
    assert shown["events"][-1] == {"event": "preempted", "at_s": 199.5}
    assert shown["events_left_out"] == 401 - MAX_EVENTS


def test_a_full_queue_tells_the_client_when_to_come_again() -> None:
    unified = Unified(max_queue_len=2, max_num_seqs=1)

    def waiting() -> int:
        return unified.engine.scheduler.counts()["waiting"]

    for index in range(40):
        while waiting() == 2:
            unified.tick()
        unified.submit(request(f"r{index}", (1, 2), 20))
        unified.tick()
    while waiting() < 2:
        unified.submit(request(f"r4{waiting()}", (1, 2), 20))
        unified.tick()
    unified.submit(request("refused", (1, 2), 20))
    unified.tick()
    errors = [output.error for output in unified.outputs if output.error is not None]
    assert [type(error) for error in errors] == [Overloaded]
    assert isinstance(errors[0], Overloaded)
    assert errors[0].retry_after_s == pytest.approx(0.21, rel=0.1)  # 20 steps and one to see the end, 10 ms each


class Reply:
    """What a prefill worker said on one stream."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, message: Any) -> None:
        self.said.append(message)

    def close(self) -> None:
        """Nothing to close."""


def test_a_full_prefill_worker_tells_its_peer_when_to_come_again() -> None:
    world = World()
    limit = world.prefill.scheduler._arrivals._queue_limit
    limit._max_queue_len = 1
    taken = limit._table.slots.num_free + 1  # the first ones find a slot
    replies = [Reply() for _ in range(taken + 2)]
    for index, reply in enumerate(replies):
        opening = Open(request=request(f"r{index}", PROMPT, 4), held_tokens=0, backend="fake")
        world.prefill.inbox.post(PeerOpened(HandoffId(f"r{index}", index), opening, "d0", reply))
    world.prefill.tick(0.01)
    assert all(isinstance(reply.said[0], Accepted) for reply in replies[:taken])
    refused = [reply.said[0].error for reply in replies[taken:] if isinstance(reply.said[0], Refused)]
    assert [error.retry_after_s for error in refused if isinstance(error, Overloaded)] == pytest.approx([1.0, 2.0])


def test_a_prefill_worker_without_the_peers_backend_blames_its_setting_and_not_the_request() -> None:
    world, reply = World(), Reply()
    opening = Open(request=request("r", PROMPT, 4), held_tokens=0, backend="fast")
    world.prefill.inbox.post(PeerOpened(HandoffId("r", 1), opening, "d0", reply))
    world.prefill.tick(0.01)
    (refused,) = reply.said
    assert (type(refused.error), refused.error.field) == (Unavailable, "kv_transfer_backend")
    assert "wanted one of fake, got fast; see --kv-transfer-backend" in refused.error.message
