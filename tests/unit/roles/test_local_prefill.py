"""Which prompts a decode worker computes itself though its prefill workers answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.config import LocalPrefill, TransferConfig
from jdisagg.handoff.messages import HandoffId
from jdisagg.roles import engine_loop
from jdisagg.roles.peer_choice import PeerChoice
from tests.unit.roles.world import PEERS, World
from tests.unit.sched.engine_fake import expected, request

pytestmark = pytest.mark.usefixtures("no_sleep", "no_listening")


def test_prompts_below_the_limit_never_leave_the_decode_worker() -> None:
    world = World(below_tokens=12)
    short, long = tuple(range(3, 14)), tuple(range(3, 15))
    assert (len(short), len(long)) == (11, 12)
    world.submit(request("short", short, 6))
    world.settle()
    assert world.tokens("short") == expected(short, 6)
    assert (world.wire.num_opened, world.decode.scheduler.stats.prefill_tokens) == (0, 11)
    world.submit(request("long", long, 6))
    world.settle()
    assert world.tokens("long") == expected(long, 6)
    assert (world.wire.num_opened, world.decode.scheduler.stats.prefill_tokens) == (1, 11)


def test_a_short_prompt_that_loses_its_pages_is_computed_here_again() -> None:
    world = World(below_tokens=12)
    prompts = {f"r{i}": tuple(range(3 + i, 14 + i)) for i in range(4)}
    for name, prompt in prompts.items():
        world.submit(request(name, prompt, 24))
    world.settle()
    assert world.decode.scheduler.stats.retractions > 0, "four requests of 35 tokens in 23 pages of 4"
    assert {name: world.tokens(name) for name in prompts} == {name: expected(prompt, 24) for name, prompt in prompts.items()}
    assert world.wire.num_opened == 0


def test_where_prompts_are_never_computed_here_who_is_down_is_asked_when_nobody_else_can_serve() -> None:
    wire = World().wire
    choice = PeerChoice(TransferConfig(local_prefill=LocalPrefill.NEVER), wire, lambda is_shunned: PEERS)
    wire.down.add(PEERS[0])
    assert choice.of(request("r", (3, 4), 2)) == (*PEERS[1:], PEERS[0]), "the others may be too short for it"


def test_who_did_not_pair_is_asked_last_and_who_is_down_not_at_all() -> None:
    wire = World().wire
    choice = PeerChoice(TransferConfig(), wire, lambda is_shunned: PEERS)
    assert choice.of(request("r", (3, 4), 2)) == ("p0", "p1")
    wire.refusing.add("p0")
    assert choice.of(request("r", (3, 4), 2)) == ("p1", "p0")
    named = replace(request("r", (3, 4), 2), prefill_peers=("p0", "p2", "p1"))
    assert choice.of(named) == ("p2", "p1", "p0")
    wire.down.add("p2")
    assert choice.of(named) == ("p1", "p0")


def test_of_peers_that_nobody_ordered_the_first_is_asked_that_has_no_more_waiting_than_the_prompt() -> None:
    choice = PeerChoice(TransferConfig(), World().wire, lambda is_shunned: PEERS)
    prompt, named = request("r", tuple(range(3, 13)), 2), ("p1", "p0")
    choice.opened(HandoffId("a", 1), "p0", 9)
    assert choice.of(prompt) == ("p0", "p1"), "nine tokens wait there, ten come"
    choice.opened(HandoffId("b", 2), "p0", 1)
    assert choice.of(prompt) == ("p1", "p0")
    assert choice.of(request("long", tuple(range(3, 14)), 2)) == ("p0", "p1")
    choice.opened(HandoffId("c", 3), "p1", 10)
    assert choice.of(prompt) == ("p0", "p1")
    choice.computed("a")
    assert choice.of(replace(prompt, prefill_peers=named)) == named, "routers know what others have waiting"
    assert choice.snapshot() == {"p0": 1, "p1": 10}
    choice.closed(HandoffId("a", 1))
    choice.closed(HandoffId("b", 2))
    choice.closed(HandoffId("c", 3))
    assert choice.snapshot() == {}


def test_a_burst_is_shared_by_the_static_prefill_workers() -> None:
    world = World()
    opened: list[str] = []
    open_stream = world.wire.open
    world.wire.open = lambda peer, handoff, message: (opened.append(peer), open_stream(peer, handoff, message))[1]
    prompts = {f"r{i}": tuple(range(3 + i, 14 + i)) for i in range(4)}
    for name, prompt in prompts.items():
        world.submit(request(name, prompt, 4))
    world.settle()
    assert {name: world.tokens(name) for name in prompts} == {name: expected(prompt, 4) for name, prompt in prompts.items()}
    assert opened == ["p0", "p1", "p0", "p1"]


def test_who_has_computed_a_prompt_is_free_for_others_while_its_kv_still_travels() -> None:
    world = World()
    world.submit(request("r", tuple(range(3, 14)), 4))
    asked = []
    while not world.tokens("r"):
        world.tick()
        assert world.decode.loop is not None
        asked.append(world.decode.loop.snapshot()["handoff"]["asked_tokens"])
    assert {"p0": 11} in asked
    assert world.wire.open_streams
    assert asked[-1] == {}
    world.settle()


def test_kv_on_the_host_is_not_let_go_where_nothing_may_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two choices of one beginning, and room for one of them: it is in memory, and would save pages, elsewhere."""
    monkeypatch.setattr(engine_loop, "IDLE_WAIT_S", 0.0)
    world = World(local_prefill=False, decode_pages=13, prefill_pages=60, reserved_decode_tokens=0, host_tokens=200)
    shared = tuple(range(1, 17))
    for name, more, num in (("a", (20, 21, 22), 11), ("b", (21, 22, 23, 24), 22)):
        world.submit(request(name, shared + more, num))
    world.settle()
    assert world.decode.scheduler.stats.retractions > 0
    assert world.decode.scheduler.stats.restored_tokens > 0
    assert world.decode.scheduler.stats.prefill_tokens == 0
