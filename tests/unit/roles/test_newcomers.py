"""A prefill worker that comes helps those that wait for a full one, and not later requests alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.errors import DeadlineExceeded, Overloaded
from jdisagg.handoff.events import FromPrefill
from jdisagg.handoff.messages import HandoffId, Open, Refused
from tests.unit.roles.world import PROMPT, World
from tests.unit.sched.engine_fake import expected, request

pytestmark = pytest.mark.usefixtures("no_sleep", "no_listening")


def full_world(known: list[str]) -> tuple[World, list[tuple[str, str]]]:
    """Prefill worker p0 is full for good; who asked whom."""
    world, asked = World(local_prefill=False), list[tuple[str, str]]()
    world.decoders[0].role._peer_choice._known_peers = lambda is_shunned: tuple(known)
    really_open = world.wire.open

    def open_(peer: str, handoff: HandoffId, message: Open) -> None:
        asked.append((handoff.request_id, peer))
        if peer == "p0":
            world.decode.inbox.post(FromPrefill(handoff, Refused(error=Overloaded("4096 requests are waiting"))))
        else:
            really_open(peer, handoff, message)

    world.wire.open = open_  # type: ignore[method-assign]
    return world, asked


def run(world: World, until_s: float) -> None:
    while world.now_s < until_s:
        if not world.tick():
            world.now_s += 0.2


@pytest.mark.parametrize("named", [(), ("p0",)])
def test_whoever_waits_for_a_full_worker_is_served_by_one_that_comes(named: tuple[str, ...]) -> None:
    known = ["p0"]
    world, asked = full_world(known)
    world.submit(replace(request("early", PROMPT, 4, deadline_s=600.0), prefill_peers=named))
    run(world, 5.0)
    assert set(asked) == {("early", "p0")}
    known.append("p1")
    run(world, 8.0)
    assert world.tokens("early") == expected(PROMPT, 4)
    world.settle()


def test_a_request_that_waited_for_a_full_worker_until_its_deadline_says_for_which() -> None:
    world, _ = full_world(["p0"])
    world.submit(request("early", PROMPT, 4, deadline_s=20.0))
    run(world, 21.0)
    error = world.outputs["early"][-1].error
    assert isinstance(error, DeadlineExceeded)
    assert error.message.endswith("at stage waiting without a prefill worker; p0 was full")
    world.settle()
