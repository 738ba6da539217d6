"""What an engine hears while it waits for a step that computes prompts."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from jdisagg.handoff.messages import ChunkReady, HandoffId, PrefillToDecode
from jdisagg.roles import engine_loop
from tests.unit.roles.world import World
from tests.unit.sched.engine_fake import expected, request

PROMPT = tuple(range(3, 39))  # three steps of 12 tokens


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "IDLE_WAIT_S", 0.0)
    monkeypatch.setattr(engine_loop, "LISTEN_S", 0.0)


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
