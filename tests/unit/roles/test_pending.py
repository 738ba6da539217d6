"""What an engine says it still has to do: nothing when idle, every live request by name, and less with each that ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jdisagg.core.requests import Output, Role
from jdisagg.roles.inbox import Cancel, Submit
from jdisagg.roles.unified import UnifiedRole
from jdisagg.sched import log_codec
from jdisagg.sched.plan import Plan
from tests.unit.roles.engine import Engine
from tests.unit.roles.second_turn import first_turn
from tests.unit.roles.world import PEERS, World
from tests.unit.sched.engine_fake import expected, request


class Unified:
    """One engine, ticked by hand."""

    def __init__(self) -> None:
        self.engine = Engine(Role.UNIFIED, 24, local_prefill=True)
        self.engine.run(UnifiedRole(self.engine.scheduler))
        self.outputs: dict[str, list[Output]] = {}

    def submit(self, name: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        sink = self.outputs.setdefault(name, []).extend
        self.engine.inbox.post(Submit(request(name, prompt, max_tokens), sink))

    def tick(self, count: int = 1) -> dict[str, Any]:
        """The state after so many ticks."""
        for _ in range(count):
            self.engine.tick(0.0)
        assert self.engine.loop is not None
        return self.engine.loop.snapshot()

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]


def sequences(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["request_id"]: one for one in state["scheduler"]["sequences"]}


def pages_held(state: dict[str, Any]) -> int:
    return state["scheduler"]["pages"]["total"] - state["scheduler"]["pages"]["free"]


@pytest.mark.covers("H15")
def test_live_requests_are_listed_until_they_end_and_each_end_frees_what_it_held() -> None:
    world = Unified()
    idle = world.tick()
    assert world.engine.scheduler.is_idle()
    assert (idle["streams"], sequences(idle), pages_held(idle), idle["in_flight"]) == ([], {}, 0, None)

    world.submit("short", (1, 2, 3), 2)
    world.submit("long", (4, 5, 6, 7, 8), 30)
    world.submit("unwanted", (9, 10), 30)
    busy = world.tick()
    assert not world.engine.scheduler.is_idle()
    assert busy["streams"] == ["short", "long", "unwanted"]
    assert set(sequences(busy)) == {"short", "long", "unwanted"}
    assert isinstance(log_codec.decode(json.loads(json.dumps(busy["in_flight"]))), Plan)

    while not any(output.finish for output in world.outputs["short"]):
        one_less = world.tick()
    assert world.tokens("short") == expected((1, 2, 3), 2)
    assert one_less["streams"] == ["long", "unwanted"]
    active = sequences(one_less)
    assert set(active) == {"long", "unwanted"}
    assert pages_held(one_less) == sum(one["pages"] for one in active.values())
    assert {name: one["generated_tokens"] for name, one in active.items()} == {
        name: len(world.tokens(name)) for name in active
    }, "what is listed as generated is what was delivered"

    world.engine.inbox.post(Cancel("unwanted", 0))
    alone = world.tick()
    assert alone["streams"] == ["long"]
    assert pages_held(alone) == sequences(alone)["long"]["pages"]

    while not any(output.finish for output in world.outputs["long"]):
        assert not world.engine.scheduler.is_idle()
        world.tick()
    over = world.tick(2)
    assert world.engine.scheduler.is_idle()
    assert (over["streams"], sequences(over), pages_held(over), over["in_flight"]) == ([], {}, 0, None)
    assert world.tokens("long") == expected((4, 5, 6, 7, 8), 30)


@pytest.mark.covers("H15")
def test_a_hand_off_is_listed_on_both_sides_until_it_ends() -> None:
    world = World(local_prefill=False)
    world.submit(request("r", tuple(range(1, 21)), 4))
    prefill, decode = world.prefill.loop, world.decode.loop
    assert prefill is not None
    assert decode is not None
    seen_on_both = False
    for _ in range(200):
        world.tick()
        there, here = prefill.snapshot(), decode.snapshot()
        if any(output.finish for output in world.outputs["r"]):
            break
        assert here["streams"] == ["r"]
        assert not (world.decode.scheduler.is_idle() and world.handoffs.is_idle)
        seen_on_both = seen_on_both or (bool(there["scheduler"]["sequences"]) and bool(here["scheduler"]["sequences"]))
    assert seen_on_both
    world.settle()  # asserts that pages, streams, hand-offs and published pieces are gone
    assert decode.snapshot()["streams"] == []
    assert world.tokens("r") == expected(tuple(range(1, 21)), 4)


def test_the_state_says_whose_it_is_and_whether_it_drains_and_the_log_what_the_device_works_on() -> None:
    world = Unified()
    loop = world.engine.loop
    assert loop is not None
    idle = world.tick()
    assert (idle["worker"], idle["draining"], loop.in_flight_text()) == ("unified", False, "None")
    world.submit("a", (1, 2, 3), 2)
    busy = world.tick()
    assert loop.in_flight_text() == repr(log_codec.decode(busy["in_flight"]))
    loop.start_draining()
    assert loop.snapshot()["draining"] is True


def test_both_sides_show_whose_kv_lies_ready_and_who_borrows_of_whom() -> None:
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world)
    assert world.prefill.loop is not None
    assert world.decode.loop is not None
    world.submit(request("t2", prompt, 4, ignore_eos=True))
    lent, borrowed, replies, buffered_bytes = set[str](), set[str](), set[int](), set[int]()
    while not any(output.finish for output in world.outputs["t2"]):
        world.tick()
        there, here = world.prefill.loop.snapshot()["handoff"], world.decode.loop.snapshot()["handoff"]
        assert here["peers"] == dict.fromkeys(PEERS, "")
        lent |= {name.partition("#")[0] for name in here["lending"]}
        borrowed |= {loan["from"] for loan in there["borrowing"].values()}
        replies.add(there["replies"])
        buffered_bytes.add(there["buffered_bytes"])
    assert (lent, borrowed, max(replies)) == ({"t2"}, {"d0"}, 1)
    assert max(buffered_bytes) > 0
    world.settle()
