"""A prefill worker that drains: what it has begun goes on to its end, parked prompts too, and nothing new is taken."""

from __future__ import annotations

import pytest

from tests.unit.roles.world import World, two_full_pools
from tests.unit.sched.engine_fake import expected, request

PROMPT = tuple(range(3, 22))

pytestmark = pytest.mark.usefixtures("no_sleep")


def drain_prefill(world: World) -> None:
    assert world.prefill.loop is not None
    world.prefill.loop.start_draining()


def num_unfinished(world: World) -> int:
    assert world.prefill.loop is not None
    return world.prefill.loop.num_unfinished


def test_a_draining_prefill_worker_finishes_its_hand_offs_and_takes_no_new_one() -> None:
    world = World(local_prefill=True)
    world.submit(request("begun", PROMPT, 6))
    for _ in range(3):
        world.tick()
    assert num_unfinished(world) == 1
    drain_prefill(world)
    world.submit(request("late", (7, *PROMPT), 6))
    world.settle()
    assert num_unfinished(world) == 0
    assert world.tokens("begun") == expected(PROMPT, 6)
    assert world.tokens("late") == expected((7, *PROMPT), 6)
    by = {name: world.outputs[name][-1].provenance for name in ("begun", "late")}
    assert by["begun"] is not None
    assert (by["begun"].prefill_worker, by["begun"].recoveries) == ("p0", ())
    assert by["late"] is not None
    assert by["late"].prefill_worker == "", "the drained worker computed nothing of it"
    assert world.prefill.scheduler.stats.prefill_tokens == len(PROMPT)


def test_a_parked_prompt_keeps_a_draining_prefill_worker_until_it_was_computed_again() -> None:
    """A comes to P a second time while computed B fills P and waits for D: B is parked, P drains, both end as they should."""
    world = two_full_pools()
    while not world.prefill.scheduler.counts()["parked"]:
        assert world.now_s < 10.0, world.text()
        world.tick()
    drain_prefill(world)
    assert num_unfinished(world) == 2
    world.settle()
    assert num_unfinished(world) == 0
    assert world.tokens("a") == expected(tuple(range(1, 21)), 4)
    assert world.tokens("b") == expected(tuple(range(2, 31)), 4)


def test_when_only_a_draining_worker_may_compute_it_a_prompt_waits_for_the_next_in_its_place() -> None:
    world = World(local_prefill=False)
    drain_prefill(world)
    world.submit(request("late", PROMPT, 6))
    for _ in range(300):
        world.tick()
    assert world.outputs["late"] == [], "neither failed nor begun"
    assert world.wire.num_opened > 3, "asked again and again"
    world.prefill.scheduler._arrivals.is_draining = False  # what a new process would be
    world.settle()
    assert world.tokens("late") == expected(PROMPT, 6)
    provenance = world.outputs["late"][-1].provenance
    assert provenance is not None
    assert provenance.recoveries == (), "to wait is no recovery"
