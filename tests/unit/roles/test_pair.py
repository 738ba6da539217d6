"""A prefill and a decode engine together: exact streams, one end each, nothing left, whatever happens in between."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis.stateful import run_state_machine_as_test

from jdisagg.core.errors import HandoffLost, Overloaded
from jdisagg.core.requests import FinishReason, Output
from jdisagg.handoff.events import FromPrefill, PeerMessage, PeerOpened
from jdisagg.handoff.messages import Accepted, ChunkReady, HandoffId, Started, StreamEnded
from jdisagg.roles import engine_loop
from jdisagg.roles.inbox import Inbox, Message, Submit
from jdisagg.transfer.base import PieceFailed
from tests.unit.roles.network_fake import FakeFetcher
from tests.unit.roles.pair_rules import PairMachine
from tests.unit.roles.world import PEERS, World, two_full_pools
from tests.unit.sched.engine_fake import expected, request


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "IDLE_WAIT_S", 0.0)
    monkeypatch.setattr(engine_loop, "LISTEN_S", 0.0)


PROMPT = tuple(range(3, 22))


@pytest.mark.covers("D14")
def test_stream_is_exact_and_everything_is_freed() -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 6))
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)
    assert world.outputs["a"][-1].finish is FinishReason.LENGTH
    assert world.decode.scheduler.stats.prefill_tokens == 0


@pytest.mark.covers("D02")
def test_the_peer_is_asked_at_once_and_no_page_is_taken_before_it_has_begun() -> None:
    world = World(local_prefill=False)
    scheduler = world.decode.scheduler
    world.submit(request("a", PROMPT, 6))
    for _ in range(5):  # P stands still
        world.decode.tick(world.now_s)
        world.network.step()
    assert len(world.wire.open_streams) == 1
    assert scheduler.counts()["prealloc"] == 1
    assert scheduler.num_free_pages == scheduler.num_pages
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)


def test_last_output_says_where_the_prompt_was_computed() -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 6))
    world.settle()
    provenance = world.outputs["a"][-1].provenance
    assert provenance is not None
    assert (provenance.prefill_worker, provenance.decode_worker) == ("p0", "decode")
    assert (provenance.transferred_tokens, provenance.transferred_pages) == (19, 5)
    assert provenance.transferred_bytes == 19 * 4


def test_tokens_that_were_found_when_the_turn_of_a_prompt_came_were_not_computed_for_it() -> None:
    """Two prompts that begin alike come at once: the second one is accepted before the first one's KV is in the cache."""
    world = World(local_prefill=False, prefill_pages=8)
    for name, last in (("a", 7), ("b", 8)):
        world.submit(request(name, (*PROMPT, last), 6))
    world.settle()
    told = [world.outputs[name][-1] for name in "ab"]
    computed = [output.provenance.prefilled_tokens for output in told if output.provenance is not None]
    assert [output.cached_tokens for output in told] == [0, 12]
    assert computed == [20, 8]
    assert sum(computed) == world.prefill.scheduler.stats.prefill_tokens


def test_phases_on_the_decode_worker_part_at_the_start_of_the_prompts_computation() -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 6))
    world.settle()

    def read(name: str) -> float:
        return world.decode.metrics.registry.get_sample_value(name) or 0.0

    seconds = {name: read(f"jdisagg_request_{name}_seconds_sum") for name in ("queue", "prefill", "transfer", "decode")}
    counts = {name: read(f"jdisagg_request_{name}_seconds_count") for name in seconds}
    assert counts == dict.fromkeys(seconds, 1.0)
    assert seconds["prefill"] > 0, "time on P is not time in a queue"
    assert seconds["queue"] + seconds["prefill"] == pytest.approx(read("jdisagg_time_to_first_token_seconds_sum"))


def test_second_request_fetches_only_what_the_prefix_cache_lacks() -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 3))
    world.settle()
    world.submit(request("b", (*PROMPT, 7, 8), 3))
    world.settle()
    provenance = world.outputs["b"][-1].provenance
    assert world.tokens("b") == expected((*PROMPT, 7, 8), 3)
    assert provenance is not None
    assert provenance.transferred_tokens == 21 - 16  # the four full pages of "a" are here already


@pytest.mark.covers("D20")
def test_single_token_requests_transfer_nothing() -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 1))
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 1)
    assert world.outputs["a"][-1].provenance is not None
    assert world.outputs["a"][-1].provenance.transferred_bytes == 0


def test_cut_stream_is_recovered_by_another_peer() -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 6))
    for _ in range(3):
        world.tick()
    for handoff in list(world.wire.open_streams):
        world.wire.cut(handoff, "dead")
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)
    assert world.decode.metrics.fleet.recoveries.labels(rung="other_prefill")._value.get() == 1


def test_a_peer_whose_pieces_stall_is_remembered_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(local_prefill=True)

    def stall(self: FakeFetcher, handoff: HandoffId, peer: str, ready: ChunkReady, deadline_s: float) -> None:
        self._inbox.post(PieceFailed(handoff=handoff, ready=ready, reason="stalled"))

    monkeypatch.setattr(FakeFetcher, "fetch", stall)
    world.submit(request("a", PROMPT, 6))
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)
    assert world.wire.without_kv == {"p0", "p1"}
    told = world.outputs["a"][-1].provenance
    assert told is not None
    assert told.recoveries == ("refetch", "other_prefill", "refetch", "local_prefill")


def test_without_any_working_peer_the_prompt_is_computed_here() -> None:
    world = World(local_prefill=True)
    world.submit(request("a", PROMPT, 6))
    for _ in range(200):
        world.tick()
        for handoff in list(world.wire.open_streams):
            world.wire.cut(handoff, "dead")
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)
    assert world.decode.scheduler.stats.prefill_tokens == len(PROMPT)
    provenance = world.outputs["a"][-1].provenance
    assert provenance is not None
    assert (provenance.prefill_worker, provenance.prefilled_tokens) == ("", len(PROMPT))
    assert provenance.recoveries == ("other_prefill", "local_prefill")


def test_the_log_says_once_that_nobody_prefills_and_when_somebody_does_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world = World(local_prefill=True)
    world.wire.down = {"p0", "p1"}
    for name in ("a", "b", "c"):
        world.submit(request(name, PROMPT, 3))
        world.settle()
    said = "no prefill worker is known to answer (down); prompts are computed here until one does"
    assert caplog.text.count(said) == 1
    world.wire.down = set()
    for name in ("d", "e"):
        world.submit(request(name, (*PROMPT, ord(name)), 3))
        world.settle()
    assert caplog.text.count("a prefill worker serves again; 3 prompts were computed here meanwhile") == 1
    world.wire.down = {"p0", "p1"}
    world.submit(request("f", (*PROMPT, 5), 3))
    world.settle()
    assert caplog.text.count(said) == 2


def test_the_log_names_the_request_for_which_every_prefill_worker_failed(caplog: pytest.LogCaptureFixture) -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 6))
    world.submit(request("late", PROMPT, 6))
    world.cancel("late")
    for _ in range(200):
        world.tick()
        for handoff in list(world.wire.open_streams):
            world.wire.cut(handoff, "dead")
    world.settle()
    error = world.outputs["a"][-1].error
    assert isinstance(error, HandoffLost)
    failed = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert failed == [error.message.replace("request a: ", "request a: failed: ")]


def peers(world: World, state: str) -> float:
    return world.decode.metrics.fleet.peers.labels(state=state)._value.get()


def test_peers_known_to_be_down_are_not_asked() -> None:
    world = World(local_prefill=True)
    world.wire.down = {"p0", "p1"}
    world.submit(request("a", PROMPT, 6))
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)
    assert world.wire.num_opened == 0
    assert peers(world, "down") == 2
    world.wire.down, world.wire.draining = {"p1"}, {"p0"}
    world.settle()
    assert [peers(world, state) for state in ("usable", "draining", "down")] == [0, 1, 1]
    world.wire.down, world.wire.draining = {"p0"}, set()
    world.submit(request("b", (*PROMPT, 4), 6))
    world.settle()
    provenance = world.outputs["b"][-1].provenance
    assert provenance is not None
    assert (provenance.prefill_worker, provenance.recoveries) == ("p0", ())  # the fake P calls itself p0


@pytest.mark.covers("X01", "C10")
def test_request_that_no_peer_can_serve_fails_alone() -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 6))
    world.submit(request("b", (5, 6, 7), 6))
    for _ in range(400):
        world.tick()
        for handoff in list(world.wire.open_streams):
            if handoff.request_id == "a":
                world.wire.cut(handoff, "dead")
    world.settle()
    assert world.outputs["a"][-1].error is not None
    assert "dead" in world.outputs["a"][-1].error.message
    assert world.tokens("b") == expected((5, 6, 7), 6)


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


def test_nobody_takes_pages_in_a_pause_though_its_last_peer_had_begun() -> None:
    world = World(local_prefill=False, decode_pages=10)
    world.submit(request("a", tuple(range(1, 21)), 12))
    for _ in range(12):
        world.tick()
    world.submit(request("b", tuple(range(2, 22)), 4))
    world.decode.tick(world.now_s)
    for _ in PEERS:
        (stream,) = [handoff for handoff in world.wire.open_streams if handoff.request_id == "b"]
        for message in (Accepted(cached_tokens=0), Started(), StreamEnded(reason="closed", error=Overloaded("it stops"))):
            world.decode.inbox.post(FromPrefill(stream, message))
        world.decode.tick(world.now_s)
    assert (world.handoffs.counts()["waiting"], world.decode.scheduler.counts()["running"]) == (1, 1), world.text()
    world.cancel("a")
    for _ in range(3):
        world.decode.tick(world.now_s)
    counts = world.decode.scheduler.counts()
    assert (counts["prealloc"], counts["transfer"]) == (1, 0), "nobody sends its KV"
    world.settle()
    assert world.tokens("b") == expected(tuple(range(2, 22)), 4)


@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("num_prefill_ticks", range(1, 9))
def test_reused_id_gets_nothing_of_the_cancelled_request(max_tokens: int, num_prefill_ticks: int) -> None:
    """Everything P sent for the old one, its cancel and the new one are read in one tick."""
    world = World(local_prefill=False)
    world.submit(request("a", tuple(range(3, 9)), max_tokens))
    world.decode.tick(0.01)
    for number in range(num_prefill_ticks):
        world.network.step()
        world.prefill.tick(0.02 + 0.01 * number)
    world.cancel("a")
    got: list[Output] = []
    world.decode.inbox.post(Submit(request("a", PROMPT, 6), got.extend))
    world.now_s = 0.5
    world.settle()
    assert [token for output in got for token in output.token_ids] == expected(PROMPT, 6)
    assert [output.finish for output in got if output.finish] == [FinishReason.LENGTH]
    assert world.outputs["a"] == []


def test_newer_attempt_takes_the_place_of_an_older_one() -> None:
    """A router whose stream broke replays here before this worker has seen the break."""
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 6))
    for _ in range(6):
        world.tick()
    delivered = tuple(world.tokens("a"))
    got: list[Output] = []
    world.decode.inbox.post(Submit(replace(request("a", PROMPT, 6, generated=delivered), attempt=1), got.extend))
    world.tick()
    world.cancel("a")  # the older attempt's, at last
    world.settle()
    assert [*delivered, *(token for output in got for token in output.token_ids)] == expected(PROMPT, 6)
    assert {output.attempt for output in got} == {1}
    assert tuple(world.tokens("a")) == delivered


class StrictPairMachine(PairMachine):
    """The same with a decode worker that must not prefill."""

    local_prefill = False


@pytest.mark.covers("I-2")
@pytest.mark.covers("I-3", "I-4", "X26")
@pytest.mark.parametrize("machine", [PairMachine, StrictPairMachine], ids=["on-failure", "never"])
def test_every_history_ends_exact_and_quiescent(machine: type[PairMachine]) -> None:
    assert run_state_machine_as_test(machine) is None  # the machine's teardown asserts


def test_a_worker_that_stood_still_blames_its_peer_for_none_of_that() -> None:
    world = World()
    world.submit(replace(request("r", (3, 4, 5), 2), deadline_s=1e6))
    for now_s in (0.0, 0.1):
        world.decode.tick(now_s)
    opened = set(world.wire.open_streams)
    assert opened
    world.decode.tick(58.0)
    assert set(world.wire.open_streams) == opened
    assert world.decode.metrics.fleet.recoveries.labels(rung="other_prefill")._value.get() == 0
    world.now_s = 58.0
    world.settle()
    assert world.tokens("r") == expected((3, 4, 5), 2)


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
