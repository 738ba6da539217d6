"""What a worker says that cannot take a request: when to come again, or which of its settings is in the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jdisagg.core.errors import ContextLengthExceeded, Overloaded, Unavailable
from jdisagg.handoff.events import FromPrefill, PeerAlive, PeerOpened
from jdisagg.handoff.messages import Accepted, HandoffId, Open, Refused, Started
from tests.unit.roles.measured import Unified, read
from tests.unit.roles.world import PROMPT, World
from tests.unit.sched.engine_fake import expected, request

pytestmark = pytest.mark.usefixtures("no_sleep")


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
    begun = Open(request=request("begun", PROMPT, 4), held_tokens=0, backend="fake", goes_on=True)
    world.prefill.inbox.post(PeerOpened(HandoffId("begun", 1), begun, "d0", reply := Reply()))
    world.prefill.tick(0.01)
    assert isinstance(reply.said[0], Accepted), "its client has the first token, and was promised the rest"


def test_a_prompt_that_no_prefill_worker_holds_is_refused_with_the_length_to_use() -> None:
    world = World(local_prefill=False, prefill_pages=5)
    held = world.prefill.scheduler.num_pages * 4
    for name, length in (("taken", held), ("refused", held + 1)):
        world.submit(request(name, tuple(range(1, length + 1)), 4))
    world.settle()
    assert len(world.tokens("taken")) == 4
    error = world.outputs["refused"][-1].error
    assert isinstance(error, ContextLengthExceeded)
    told = f"prompt of {held + 1} tokens; the prefill worker's KV pool holds {held} tokens: shorten the prompt to {held} tokens"
    assert (error.message, error.field) == (f"{told} or fewer", "prompt")


@pytest.mark.parametrize(("backends", "theirs"), [(("fake",), ("fast",)), (("fake", "slow"), ("fast", "faster"))])
def test_a_prefill_worker_without_the_peers_backend_blames_its_setting_and_not_the_request(
    backends: tuple[str, ...], theirs: tuple[str, ...]
) -> None:
    world, reply = World(backends=backends), Reply()
    opening = Open(request=request("r", PROMPT, 4), held_tokens=0, backend=theirs[0], backends=theirs)
    world.prefill.inbox.post(PeerOpened(HandoffId("r", 1), opening, "d0", reply))
    world.prefill.tick(0.01)
    (refused,) = reply.said
    assert (type(refused.error), refused.error.field) == (Unavailable, "kv_transfer_backend")
    said = f"wanted one of {', '.join(backends)}, got {', '.join(theirs)}; see --kv-transfer-backend"
    assert said in refused.error.message


def test_a_peer_that_names_no_backend_gets_the_first_one() -> None:
    world, reply = World(), Reply()
    world.prefill.inbox.post(
        PeerOpened(HandoffId("r", 1), Open(request=request("r", PROMPT, 4), held_tokens=0, backend=""), "d0", reply)
    )
    world.prefill.tick(0.01)
    assert [type(said) for said in reply.said] == [Accepted, Started]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_is_not_for_a_role_stops_its_engine(role: str) -> None:
    """A message that nobody takes is our bug; whoever sent it waits for an answer."""
    world, stream = World(), HandoffId("r", 1)
    side = world.prefill_role if role == "prefill" else world.decoders[0].role
    message = FromPrefill(stream, Started()) if role == "prefill" else PeerAlive(stream)
    with pytest.raises(AssertionError, match=f"a {role} engine got {type(message).__name__}"):
        side.handle(message, 0.0)


def test_a_refusal_names_its_request_and_attempt_and_whoever_runs_goes_on() -> None:
    unified = Unified()
    unified.submit(request("a", (1, 2, 3), 4))
    unified.tick()
    unified.submit(request("a", (1, 2, 3), 4))  # once more, the same attempt
    unified.tick()
    assert unified.engine.loop is not None
    unified.engine.loop.start_draining()
    unified.submit(replace(request("late", (1, 2, 3), 4), attempt=2))
    unified.run()
    errors = [output for output in unified.outputs if output.error is not None]
    assert [(output.request_id, output.attempt, type(output.error)) for output in errors] == [
        ("a", 0, Unavailable),
        ("late", 2, Unavailable),
    ]
    said = [output.error.message for output in errors if output.error is not None]
    assert "is running here already" in said[0]
    assert said[1] == "this worker is draining; send the request to another one"
    assert read(unified.engine.metrics, "requests_finished_total", reason="refused") == 2
    assert [token for output in unified.outputs for token in output.token_ids] == expected((1, 2, 3), 4)
