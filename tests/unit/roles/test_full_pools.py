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


STATES = ("waiting", "prealloc", "publishing", "running", "transfer")


def asked_to_stand_back(monkeypatch: pytest.MonkeyPatch, *histories: str, still_s: float = 0.0) -> list[float]:
    """Seconds at which a prefill worker wants a computed prompt to give its pages back, of one tick per 0.1 s; a tick is the
    states in which there is a prompt, comma separated. `still_s`: it is stopped for so long behind the second one."""
    world, now_s, parks_s = World(), 0.0, list[float]()
    scheduler = world.prefill.scheduler
    monkeypatch.setattr(scheduler, "park", lambda parkable: parks_s.append(round(now_s, 1)))
    for number, states in enumerate(histories):
        now_s = 0.1 * number + still_s * (number > 1)
        counts = dict.fromkeys(STATES, 0) | dict.fromkeys(states.split(","), 1)
        monkeypatch.setattr(scheduler, "counts", lambda counts=counts: counts)
        world.prefill_role.before_step(now_s)
    return parks_s


@pytest.mark.parametrize("waits", ["waiting", "prealloc", "waiting,prealloc"])
def test_a_computed_prompt_stands_back_when_others_wait_and_nothing_moves_for_a_while(
    monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    assert asked_to_stand_back(monkeypatch, *[f"{waits},publishing"] * 5) == [0.3, 0.4], "STUCK_S is 0.25"


@pytest.mark.parametrize("moves", ["waiting", "publishing", "waiting,publishing,running", "waiting,publishing,transfer"])
def test_nobody_stands_back_while_something_moves_and_the_pause_begins_anew_behind_it(
    monkeypatch: pytest.MonkeyPatch, moves: str
) -> None:
    stuck = "waiting,publishing"
    assert asked_to_stand_back(monkeypatch, *[moves] * 6) == []
    assert asked_to_stand_back(monkeypatch, stuck, stuck, moves, *[stuck] * 4) == [0.6]


@pytest.mark.parametrize("still_s", [0.3, 60.0])
def test_nobody_stands_back_for_a_pause_in_which_the_prefill_worker_itself_stood_still(
    monkeypatch: pytest.MonkeyPatch, still_s: float
) -> None:
    parks_s = asked_to_stand_back(monkeypatch, *["waiting,publishing"] * 6, still_s=still_s)
    assert parks_s == [still_s + 0.4, still_s + 0.5], "what its decode worker said meanwhile is on its way"


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
