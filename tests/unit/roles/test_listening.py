"""What an engine hears while it waits for a step that computes prompts, and what time it is then."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from jdisagg.core.requests import FinishReason, Output, Role
from jdisagg.handoff.events import PeerAlive
from jdisagg.handoff.messages import ChunkReady, HandoffId, PrefillToDecode
from jdisagg.roles import engine_loop
from jdisagg.roles.inbox import Message, Submit
from jdisagg.roles.unified import UnifiedRole
from tests.unit.roles.engine import Engine
from tests.unit.roles.measured import Ticking, read
from tests.unit.roles.world import PEERS, World
from tests.unit.sched.engine_fake import expected, request

PROMPT = tuple(range(3, 39))  # three steps of 12 tokens

pytestmark = pytest.mark.usefixtures("no_sleep", "no_listening")


def test_kv_of_a_chunk_is_announced_while_a_later_one_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(local_prefill=False)
    deliver, during_a_step = world.wire.to_decode, []

    def to_decode(handoff: HandoffId, message: PrefillToDecode) -> None:
        if isinstance(message, ChunkReady):
            during_a_step.append(world.prefill.runner.is_running)
        deliver(handoff, message)

    monkeypatch.setattr(world.wire, "to_decode", to_decode)
    world.submit(request("a", PROMPT, 4))
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 4)
    assert any(during_a_step), f"{len(during_a_step)} pieces, all announced between steps"


def test_nobody_is_asked_for_a_request_that_was_over_when_it_came() -> None:
    """Its prefill worker could answer within the step in which its end is still to be told."""
    world = World()
    world.wire.down = set(PEERS)
    world.submit(request("here", PROMPT, 3))
    world.tick()
    world.wire.down = set()

    def meanwhile() -> None:
        for _ in range(3):
            world.prefill.tick(world.now_s)

    world.decode.runner.meanwhile = meanwhile
    prompt, num_opened = (1, 2, 3), world.wire.num_opened
    world.submit(request("over", prompt, 4, generated=tuple(expected(prompt, 4))))
    world.settle()
    assert [(output.token_ids, output.finish) for output in world.outputs["over"]] == [((), FinishReason.LENGTH)]
    assert world.tokens("here") == expected(PROMPT, 3)
    assert world.wire.num_opened == num_opened


def test_a_peers_first_token_that_comes_during_a_step_is_delivered() -> None:
    world = World(below_tokens=12)
    world.submit(request("there", PROMPT, 4))
    world.decode.tick(world.now_s)

    def meanwhile() -> None:
        for _ in range(12):
            world.prefill.tick(world.now_s)

    world.decode.runner.meanwhile = meanwhile
    world.submit(request("here", (1, 2, 3), 4))
    world.settle()
    assert world.tokens("there") == expected(PROMPT, 4)
    assert world.tokens("here") == expected((1, 2, 3), 4)


def test_a_call_that_comes_during_a_step_is_run_between_two() -> None:
    world = World(local_prefill=False)
    called: list[Future[bool]] = []

    def meanwhile() -> None:
        runner = world.prefill.runner
        called.append(world.prefill.inbox.call(lambda: runner.is_running))

    world.prefill.runner.meanwhile = meanwhile
    world.submit(request("a", PROMPT, 1))
    world.settle()
    assert called
    assert not any(future.result(timeout=1.0) for future in called)


class Hearing(UnifiedRole):
    """Notes when it hears of a peer."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.scheduler)
        self.heard_s: list[float] = []

    def handle(self, message: Message, now_s: float) -> list[Output]:
        self.heard_s.append(now_s)
        return []


def test_what_a_peer_says_during_a_long_step_is_heard_then_and_not_when_the_step_began() -> None:
    clock, said_s = Ticking(), list[float]()
    engine = Engine(Role.UNIFIED, 9, True)
    side = Hearing(engine)
    engine.run(side, clock=clock)

    def meanwhile() -> None:
        clock.now_s += 7.0
        said_s.append(clock.now_s)
        engine.inbox.post(PeerAlive(HandoffId("r", 1)))

    engine.runner.meanwhile = meanwhile
    engine.inbox.post(Submit(request("a", PROMPT[:4], 1), lambda outputs: None))
    for _ in range(3):
        engine.tick(clock.now_s)
    assert len(said_s) == 1
    assert side.heard_s == pytest.approx(said_s), "what it answers may have a deadline of a few seconds"


def test_a_prefill_worker_counts_the_step_that_computes_a_prompt_as_its_prefill() -> None:
    clock, step_s = Ticking(), 0.5
    world = World(local_prefill=False, clock=clock)
    world.prefill.runner.meanwhile = None
    world.prefill.runner.collect = clock.slow(world.prefill.runner.collect, step_s)  # type: ignore[method-assign]
    world.submit(request("a", PROMPT[:10], 3))  # one step
    for _ in range(20):
        world.network.step()
        world.now_s = clock.now_s = clock.now_s + 0.01
        for engine in (world.prefill, world.decode):
            engine.tick(clock.now_s)
    world.settle()
    assert read(world.prefill.metrics, "request_prefill_seconds_sum") == pytest.approx(step_s, abs=0.05)


def test_a_request_that_wakes_an_idle_engine_came_then_and_not_when_it_fell_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time to the first token would be too long by up to `IDLE_WAIT_S`, more than a short prompt takes."""
    clock, engine, slept_s = Ticking(), Engine(Role.UNIFIED, 9, True), 0.04
    engine.run(UnifiedRole(engine.scheduler), clock=clock)
    engine.tick(clock.now_s)
    drain = engine.inbox.drain

    def drain_asleep(timeout_s: float) -> list[Message]:
        clock.now_s += slept_s
        engine.inbox.post(Submit(request("a", PROMPT[:4], 1), lambda outputs: None))
        return drain(timeout_s)

    with monkeypatch.context() as asleep:
        asleep.setattr(engine.inbox, "drain", drain_asleep)
        engine.tick(clock.now_s)
    engine.tick(clock.now_s)
    assert read(engine.metrics, "time_to_first_token_seconds_count") == 1
    assert read(engine.metrics, "time_to_first_token_seconds_sum") < slept_s / 2


def test_an_idle_engine_sleeps_until_something_comes_and_a_busy_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it takes a whole core for nothing, or adds its sleep to every step."""
    monkeypatch.setattr(engine_loop, "IDLE_WAIT_S", 0.03)
    engine, waits_s = Engine(Role.UNIFIED, 9, True), list[float]()
    engine.run(UnifiedRole(engine.scheduler))
    drain = engine.inbox.drain

    def note(wait_s: float) -> list[Message]:
        waits_s.append(wait_s)
        return drain(0.0)

    monkeypatch.setattr(engine.inbox, "drain", note)
    busy = [engine.tick(1.0), engine.tick(1.1)]
    engine.inbox.post(Submit(request("a", PROMPT[:4], 2), lambda outputs: None))
    while len(busy) < 3 or busy[-1]:
        busy.append(engine.tick(1.0 + 0.1 * len(busy)))
    engine.tick(2.0)
    assert busy[:4] == [False, False, True, True]
    assert waits_s == [0.0, *(0.0 if was_busy else 0.03 for was_busy in busy)]


def test_ledgers_are_checked_once_an_engine_has_been_idle_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, checks = Engine(Role.UNIFIED, 9, True), list[float]()
    engine.run(UnifiedRole(engine.scheduler), clock=lambda: 0.0)
    loop = engine.loop
    assert loop is not None
    monkeypatch.setattr(engine.scheduler, "check", lambda: checks.append(now_s))
    engine.inbox.post(Submit(request("a", PROMPT[:4], 2), lambda outputs: None))
    now_s = 1.0
    while loop.tick(now_s):
        now_s += 1.0
    idle_s = now_s
    for tick in range(1, 10):
        engine.inbox.call(lambda: None)  # somebody who asks how it is
        now_s = idle_s + 0.25 * tick
        loop.tick(now_s)
    assert checks == [idle_s + 1.0]


def test_the_time_to_the_first_token_ends_when_the_step_that_brings_it_does() -> None:
    clock, engine, plan_s, wait_s = Ticking(), Engine(Role.UNIFIED, 9, True), 0.5, 0.25
    engine.scheduler.schedule = clock.slow(engine.scheduler.schedule, plan_s)  # type: ignore[method-assign]
    engine.runner.collect = clock.slow(engine.runner.collect, wait_s)  # type: ignore[method-assign]
    engine.run(UnifiedRole(engine.scheduler), clock=clock)
    engine.inbox.post(Submit(request("a", PROMPT[:4], 1), lambda outputs: None))
    for _ in range(2):
        engine.tick(clock.now_s)
    assert read(engine.metrics, "time_to_first_token_seconds_sum") == pytest.approx(2 * plan_s + wait_s)
