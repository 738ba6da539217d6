"""Prefill workers that are lost, down or stalled: who is asked instead, what is computed here, and what the log says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import HandoffLost, Unavailable
from jdisagg.handoff.events import FromPrefill
from jdisagg.handoff.messages import ChunkReady, HandoffId, Quiet
from jdisagg.handoff.overdue import ANSWER_TIMEOUT_S
from jdisagg.transfer.base import PieceFailed
from tests.unit.roles.measured import read
from tests.unit.roles.network_fake import CHUNK_TOKENS, FakeFetcher
from tests.unit.roles.world import PROMPT, World
from tests.unit.sched.engine_fake import expected, request

pytestmark = pytest.mark.usefixtures("no_sleep", "no_listening")


def served_though_cut(max_tokens: int, *, after_ticks: int) -> World:
    """A request whose first stream is cut, and which another prefill worker serves."""
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, max_tokens))
    for _ in range(after_ticks):
        world.tick()
    for handoff in list(world.wire.open_streams):
        world.wire.cut(handoff, "dead")
    world.settle()
    assert world.tokens("a") == expected(PROMPT, max_tokens)
    return world


def test_cut_stream_is_recovered_by_another_peer() -> None:
    world = served_though_cut(6, after_ticks=3)
    assert world.decode.metrics.fleet.recoveries.labels(rung="other_prefill")._value.get() == 1


def test_one_that_ends_with_its_first_token_says_what_it_took_too() -> None:
    told = served_though_cut(1, after_ticks=2).outputs["a"][-1].provenance
    assert told is not None
    assert told.recoveries == ("other_prefill",)


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


def test_the_last_peer_of_a_request_that_fails_for_its_pieces_is_remembered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(local_prefill=False)

    def stall(self: FakeFetcher, handoff: HandoffId, peer: str, ready: ChunkReady, deadline_s: float) -> None:
        self._inbox.post(PieceFailed(handoff=handoff, ready=ready, reason="stalled"))

    monkeypatch.setattr(FakeFetcher, "fetch", stall)
    world.submit(request("a", PROMPT, 6))
    world.settle()
    assert isinstance(world.outputs["a"][-1].error, HandoffLost)
    assert world.wire.without_kv == {"p0", "p1"}


def test_what_came_before_the_last_peer_failed_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, fetch, comes = World(local_prefill=True), FakeFetcher.fetch, iter((True,))

    def stall(self: FakeFetcher, handoff: HandoffId, peer: str, ready: ChunkReady, deadline_s: float) -> None:
        if next(comes, False):
            fetch(self, handoff, peer, ready, deadline_s)
        else:
            self._inbox.post(PieceFailed(handoff=handoff, ready=ready, reason="stalled"))

    monkeypatch.setattr(FakeFetcher, "fetch", stall)
    world.submit(request("a", PROMPT, 6))
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)
    assert world.decode.scheduler.stats.prefill_tokens == len(PROMPT) + 1 - CHUNK_TOKENS, "and the first token"


def test_a_peer_whose_pieces_stalled_is_well_again_once_the_kv_of_a_prompt_came_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, fetch = World(local_prefill=False), FakeFetcher.fetch
    stalls = iter((True, True))

    def stall(self: FakeFetcher, handoff: HandoffId, peer: str, ready: ChunkReady, deadline_s: float) -> None:
        if next(stalls, False):
            self._inbox.post(PieceFailed(handoff=handoff, ready=ready, reason="stalled"))
        else:
            fetch(self, handoff, peer, ready, deadline_s)

    monkeypatch.setattr(FakeFetcher, "fetch", stall)
    world.submit(request("a", PROMPT, 6))
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)
    assert world.wire.without_kv == {"p0"}
    world.submit(request("b", PROMPT[::-1], 6))
    world.settle()
    assert world.tokens("b") == expected(PROMPT[::-1], 6)
    assert not world.wire.without_kv


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


def test_the_log_names_the_request_for_which_no_prefill_worker_answered_in_time(caplog: pytest.LogCaptureFixture) -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 6))
    while not world.outputs["a"]:
        assert world.now_s < 10 * ANSWER_TIMEOUT_S
        world.now_s += 0.1
        world.decode.tick(world.now_s)
    error = world.outputs["a"][-1].error
    assert isinstance(error, HandoffLost)
    assert error.message.replace("request a: ", "request a: failed: ") in caplog.messages
    world.settle()


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


def test_where_no_prefill_worker_is_known_each_request_that_needs_one_is_told_so_at_once() -> None:
    world = World(local_prefill=False)
    world.decoders[0].role._peer_choice._known_peers = lambda is_shunned: ()
    for name in ("a", "b"):
        world.submit(request(name, PROMPT, 6))
    world.submit(request("gone", PROMPT, 6))
    world.cancel("gone")
    world.decode.tick(world.now_s)
    assert [type(output.error) for name in ("a", "b") for output in world.outputs[name]] == [Unavailable] * 2
    assert world.outputs["gone"] == []
    world.settle()


def test_a_peer_that_sends_nothing_once_there_are_pages_is_left_after_a_lease() -> None:
    """The prompt was computed long before that."""
    world = World(local_prefill=False, decode_pages=10)
    publisher, publish = world.publishers[0], world.publishers[0].publish
    world.submit(request("runs", tuple(range(1, 21)), 16, ignore_eos=True))
    while not world.decode.scheduler.counts()["running"]:
        world.tick()
    publisher.publish = lambda *_: None  # type: ignore[method-assign,misc]  # never published, never failed
    world.submit(request("a", PROMPT, 6))
    while world.decode.scheduler.counts()["prealloc"] or not world.outputs["a"]:
        world.tick()
    reserved_s = world.now_s
    while world.wire.num_opened == 2:
        world.tick()
        world.now_s += 0.1
        assert world.now_s < reserved_s + 20.0
    assert world.now_s == pytest.approx(reserved_s + TransferConfig().lease_s, abs=0.5)
    publisher.publish = publish  # type: ignore[method-assign]
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)


def test_a_peer_that_says_nothing_of_a_prompt_that_lost_its_pages_is_left_as_at_first() -> None:
    world = World(local_prefill=False, decode_pages=14, reserved_decode_tokens=0)
    for name in ("a", "b"):
        world.submit(request(name, PROMPT, 16, ignore_eos=True))
    while not world.decode.scheduler.stats.retractions:
        world.tick()
    opened, opened_s = world.wire.num_opened, world.now_s
    assert opened == 3
    while world.wire.num_opened == opened:
        world.now_s += 0.1
        assert world.now_s < opened_s + 2 * ANSWER_TIMEOUT_S
        world.decode.tick(world.now_s)
    assert world.now_s == pytest.approx(opened_s + ANSWER_TIMEOUT_S, abs=0.3)
    world.settle()
    assert world.tokens("a") == world.tokens("b") == expected(PROMPT, 16, ignore_eos=True)


def test_when_a_quiet_peer_is_lost_the_one_asked_beside_it_goes_on_and_the_hedge_is_counted() -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 6))
    world.decode.tick(world.now_s)
    (quiet,) = world.wire.open_streams
    world.decode.inbox.post(FromPrefill(quiet, Quiet(0.6)))
    world.decode.tick(world.now_s)
    assert len(world.wire.open_streams) == 2
    world.wire.cut(quiet, "dead")
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)
    assert world.wire.num_opened == 2
    assert read(world.decode.metrics, "prefill_hedges_total", outcome="moved") == 1


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
