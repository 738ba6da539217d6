"""Two pools, both full: neither worker waits for ever for pages that the other one holds."""

from __future__ import annotations

import logging
import random

import pytest

from jdisagg.core.errors import Overloaded
from jdisagg.handoff.events import FromPrefill, PeerMessage, PeerOpened
from jdisagg.handoff.messages import Accepted, Started, StreamEnded
from jdisagg.roles.inbox import Inbox, Message
from tests.unit.handoff.rig import stages
from tests.unit.roles.world import PEERS, World, two_full_pools
from tests.unit.sched.engine_fake import expected, request

pytestmark = pytest.mark.usefixtures("no_sleep", "no_listening")


@pytest.mark.covers("I-1")
def test_two_full_pools_never_wait_for_each_other() -> None:
    """A holds pages of D and waits for P's; B holds P's pages and waits for D's: B stands back."""
    world = two_full_pools()
    world.settle()
    assert world.tokens("a") == expected(tuple(range(1, 21)), 4)
    assert world.tokens("b") == expected(tuple(range(2, 31)), 4)


def test_a_prompt_waits_no_moment_for_pages_of_those_whose_receiver_has_none() -> None:
    """A holds pages of D and comes to P a second time; B, computed, fills P and waits for D: B stands back at once, keeps its
    place on both sides, and is computed a second time only when D has room for it."""
    world = two_full_pools()
    began_s = world.now_s
    while not world.outputs["a"] or world.outputs["a"][-1].finish is None:
        assert world.now_s < began_s + 10.0, world.text()
        world.tick()
    assert world.now_s - began_s < 1.0, "no pause, no time-out: it went at once"
    opened = world.wire.num_opened
    world.settle()
    assert world.wire.num_opened == opened == 3, "B's stream was never given up"
    assert world.prefill.scheduler.stats.preemptions == 1
    assert world.tokens("b") == expected(tuple(range(2, 31)), 4)


def test_one_that_stood_back_is_shown_in_the_queue_again_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jdisagg.roles.prefill")
    world = two_full_pools()
    while not world.prefill.scheduler.counts()["parked"]:
        world.tick()
    assert world.prefill.loop is not None
    shown = world.prefill.loop.snapshot()["handoff"]["requests"]
    ((name, parked),) = [(name, record) for name, record in shown.items() if name.startswith("b")]
    assert (parked["phase"], parked["events"][-1]["event"]) == ("queue", "preempted")
    assert f"request {name}: gave its pages to waiting prompts, its receiver has none yet" in caplog.messages
    world.settle()


def one_runs_and_one_waits_for_its_pages() -> World:
    """Request a, with all of D's pages, and b, whose stream is open."""
    world = World(local_prefill=False, decode_pages=10)
    world.submit(request("a", tuple(range(1, 21)), 12))
    for _ in range(12):
        world.tick()
    world.submit(request("b", tuple(range(2, 22)), 4))
    world.decode.tick(world.now_s)
    return world


def test_nobody_takes_pages_in_a_pause_though_its_last_peer_had_begun() -> None:
    world = one_runs_and_one_waits_for_its_pages()
    for _ in PEERS:
        (stream,) = [handoff for handoff in world.wire.open_streams if handoff.request_id == "b"]
        for message in (Accepted(cached_tokens=0), Started(), StreamEnded(reason="closed", error=Overloaded("it stops"))):
            world.decode.inbox.post(FromPrefill(stream, message))
        world.decode.tick(world.now_s)
    assert (
        stages(world.handoffs),
        world.decode.scheduler.counts()["running"],
    ) == (["waiting"], 1), world.text()
    world.cancel("a")
    for _ in range(3):
        world.decode.tick(world.now_s)
    counts = world.decode.scheduler.counts()
    assert (counts["prealloc"], counts["transfer"]) == (1, 0), "nobody sends its KV"
    world.settle()
    assert world.tokens("b") == expected(tuple(range(2, 22)), 4)


def test_nobody_takes_pages_for_a_peer_that_has_not_begun_though_the_one_before_had() -> None:
    world = one_runs_and_one_waits_for_its_pages()
    (stream,) = [handoff for handoff in world.wire.open_streams if handoff.request_id == "b"]
    for message in (Accepted(cached_tokens=0), Started(), StreamEnded(reason="dead")):
        world.decode.inbox.post(FromPrefill(stream, message))
        world.decode.tick(world.now_s)
    assert world.decode.scheduler.counts()["running"] == 1
    world.cancel("a")
    for _ in range(3):
        world.decode.tick(world.now_s)
    counts = world.decode.scheduler.counts()
    assert (counts["prealloc"], counts["transfer"]) == (1, 0), "it may be long in the queue of the other one"
    world.settle()
    assert world.tokens("b") == expected(tuple(range(2, 22)), 4)


def test_a_full_decode_worker_costs_another_one_nothing() -> None:
    """D0 has 60 requests for its memory of two, and frees some of it every quarter of a second: P's pool is full of theirs."""
    world = World(num_decode=2, decode_pages=14, prefill_pages=60, caching=False)
    prompts = {f"r{i}": tuple(range(i % 20 + 1, i % 20 + 17)) for i in range(60)}
    for name, prompt in prompts.items():
        world.submit(request(name, prompt, 30), to=0)
    for _ in range(60):
        world.tick()
    for number in range(10):
        asked_s = world.now_s
        world.submit(request(f"quick{number}", tuple(range(1, 17)), 3), to=1)
        while not world.outputs[f"quick{number}"] or world.outputs[f"quick{number}"][-1].finish is None:
            assert world.now_s < asked_s + (3.0 if number == 0 else 0.5), world.text()  # the first one waits behind all of D0's
            world.tick()
    num_parked = world.prefill.scheduler.stats.preemptions
    world.settle()
    assert world.prefill.scheduler.stats.preemptions == num_parked <= 60, "nobody else waits"
    assert {name: world.tokens(name) for name in prompts} == {name: expected(prompts[name], 30) for name in prompts}


def test_of_full_decode_workers_that_take_turns_few_prompts_are_computed_twice() -> None:
    world = World(num_decode=2, decode_pages=14, prefill_pages=60, caching=False)
    for number in range(80):
        world.submit(request(f"r{number}", tuple(range(number % 20 + 1, number % 20 + 17)), 10), to=number % 2)
    world.settle()
    assert world.prefill.scheduler.stats.preemptions <= 20


@pytest.mark.covers("D14")
@pytest.mark.parametrize("pages", [(13, 13), (18, 14), (24, 12)])
def test_neither_pool_waits_for_the_other(pages: tuple[int, int]) -> None:
    """P sees the streams in another order than D opened them, both pools hold about one request, and D retracts."""
    for seed in range(12):
        rng = random.Random(seed)
        world = World(local_prefill=False, decode_pages=pages[0], prefill_pages=pages[1])
        shuffle_streams(world.prefill.inbox, rng)
        prompts = {f"r{i}": tuple(rng.randint(1, 40) for _ in range(rng.randint(6, 30))) for i in range(8)}
        for name, prompt in prompts.items():
            world.submit(request(name, prompt, 12))
            for _ in range(rng.randint(0, 2)):
                world.tick()
        world.settle()
        assert {name: world.tokens(name) for name in prompts} == {name: expected(prompts[name], 12) for name in prompts}


def shuffle_streams(inbox: Inbox, rng: random.Random) -> None:
    """What is read at once keeps its order within a stream, not between streams."""
    drain = inbox.drain

    def shuffled(wait_s: float) -> list[Message]:
        messages = drain(wait_s)
        keys = [message.handoff.request_id if isinstance(message, PeerOpened | PeerMessage) else "" for message in messages]
        ranks = {key: rng.random() for key in sorted(set(keys))}
        return [message for _, message in sorted(zip(keys, messages, strict=True), key=lambda pair: ranks[pair[0]])]

    inbox.drain = shuffled  # type: ignore[method-assign]
