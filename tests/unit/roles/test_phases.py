"""Phases of a request: each moment of it belongs to one of them, on both workers, whatever happens."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest

from jdisagg.core.errors import DeadlineExceeded
from jdisagg.core.phases import Phase, Phases
from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.roles.inbox import Cancel
from jdisagg.transfer.base import PieceFailed
from tests.unit.roles.measured import PHASES, Unified, drive, phase_sum, read
from tests.unit.roles.network_fake import FakeFetcher
from tests.unit.roles.world import PROMPT, World
from tests.unit.sched.engine_fake import expected, request

pytestmark = pytest.mark.usefixtures("no_sleep")


@pytest.mark.parametrize("seed", range(4))
def test_phases_add_up_on_both_workers_whatever_happens(seed: int) -> None:
    """Cancels, deadlines, cut streams, lost pieces, retractions: every request's phases are its whole time, once."""
    world = World(local_prefill=seed % 2 == 0, decode_pages=16, prefill_pages=14)
    drive(world, random.Random(seed), 24)
    for engine in (world.prefill, world.decode):
        metrics = engine.metrics
        assert read(metrics, "request_seconds_count") == read(metrics, "request_queue_seconds_count") > 0
        assert phase_sum(metrics) == pytest.approx(read(metrics, "request_seconds_sum"), abs=1e-9)
    ended = sum(sample.value for family in world.decode.metrics.requests.finished.collect() for sample in family.samples)
    assert read(world.decode.metrics, "request_seconds_count") == ended == 24


@pytest.mark.parametrize("end", ["ended", "preempted", "given_up", "arrived"])
def test_time_between_a_peers_token_and_its_kv_is_transfer_however_it_ends(end: str) -> None:
    phases = Phases(0.0)
    phases.started(1.0)
    phases.awaits_kv()
    phases.produced(3.0)
    if end == "ended":
        phases.ended(10.0)
        assert phases.seconds == {Phase.QUEUE: 1.0, Phase.PREFILL: 2.0, Phase.TRANSFER: 7.0}
        return
    if end == "arrived":
        phases.kv_arrived(10.0)
    elif end == "preempted":
        phases.preempted(10.0)
    else:
        phases.kv_given_up(10.0)
    assert phases.phase is (Phase.DECODE if end == "arrived" else Phase.QUEUE)
    phases.started(11.0)
    if end == "given_up":
        phases.produced(12.0)
    phases.ended(14.0)
    tail = {
        "arrived": {Phase.QUEUE: 1.0, Phase.PREFILL: 2.0, Phase.DECODE: 4.0},
        "preempted": {Phase.QUEUE: 2.0, Phase.PREFILL: 5.0},
        "given_up": {Phase.QUEUE: 2.0, Phase.PREFILL: 3.0, Phase.DECODE: 2.0},
    }
    assert phases.seconds == {Phase.TRANSFER: 7.0} | tail[end]


def test_a_prompt_whose_peer_died_before_its_first_token_is_queued_until_somebody_works_on_it() -> None:
    phases = Phases(0.0)
    phases.started(1.0)
    phases.waits(3.0)  # for another peer
    phases.waits(4.0)
    phases.started(7.0)
    phases.kv_given_up(12.0)  # it is to be computed here, and waits for that
    phases.started(22.0)
    phases.produced(23.0)
    phases.waits(24.0)  # decoding goes on
    phases.ended(26.0)
    assert phases.seconds == {Phase.QUEUE: 1.0 + 4.0 + 10.0, Phase.PREFILL: 2.0 + 5.0 + 1.0, Phase.DECODE: 3.0}


@pytest.mark.parametrize("peers", [("p0", "p1"), ("p0",)])
def test_a_decode_worker_knows_when_nobody_works_on_a_prompt_any_more(peers: tuple[str, ...]) -> None:
    """Its P is lost: another one is asked and has not begun yet; or there is none, and D asks the same after a pause."""
    world = World(local_prefill=False)
    world.submit(replace(request("a", tuple(range(3, 40)), 2), prefill_peers=peers))
    assert world.decode.loop is not None
    phase = ""
    while phase != "prefill":
        world.tick()
        phase = world.decode.loop.snapshot()["requests"]["a"]["phase"]
    (stream,) = world.wire.open_streams
    world.wire.cut(stream, "dead")
    world.decode.tick(world.now_s)
    assert world.decode.loop.snapshot()["requests"]["a"]["phase"] == "queue"
    world.now_s += 4.0
    world.settle()
    assert world.tokens("a") == expected(tuple(range(3, 40)), 2)
    assert 4.0 < read(world.decode.metrics, "request_queue_seconds_sum") < 5.0
    assert read(world.decode.metrics, "request_prefill_seconds_sum") < 1.0


def test_a_life_whose_kv_never_came_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    world, clock = World(local_prefill=True, slow_request_s=0.0), iter(range(1, 1000))

    def stall(self: FakeFetcher, handoff: HandoffId, peer: str, ready: ChunkReady, deadline_s: float) -> None:
        world.now_s += 5 * next(clock)  # five seconds, ten, ..
        self._inbox.post(PieceFailed(handoff=handoff, ready=ready, reason="stalled"))

    monkeypatch.setattr(FakeFetcher, "fetch", stall)
    with caplog.at_level(logging.INFO, "jdisagg.core.record"):
        world.submit(request("a", PROMPT, 6))
        world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)
    assert read(world.decode.metrics, "request_transfer_seconds_sum") > 4.0
    assert read(world.decode.metrics, "request_decode_seconds_sum") < 1.0
    (life,) = [line for line in caplog.messages if line.startswith("request a: length, 6 tokens")]
    assert ", resumed +" in life, "it was queued here"


def test_the_prefill_role_has_its_own_phases() -> None:
    world = World(local_prefill=False)
    for name in ("a", "b"):
        world.submit(request(name, (*PROMPT, ord(name)), 6))
    world.settle()
    metrics = world.prefill.metrics
    counts = {phase: read(metrics, f"request_{phase}_seconds_count") for phase in PHASES}
    assert counts == {"queue": 2, "prefill": 2, "transfer": 2, "decode": 0}
    assert read(metrics, "request_prefill_seconds_sum") > 0
    assert read(metrics, "request_transfer_seconds_sum") > 0
    assert read(metrics, "generated_tokens_total") == 0  # counted where they are delivered
    assert world.prefill.loop is not None
    assert world.prefill.loop.snapshot()["handoff"]["requests"] == {}


def test_a_request_that_is_cancelled_or_late_counts_its_time_in_the_phase_it_was_in() -> None:
    unified = Unified(max_num_seqs=1)
    unified.submit(request("runs", (1, 2), 20))
    unified.submit(request("late", (1, 2), 20, deadline_s=unified.now_s + 0.045))
    unified.submit(request("cancelled", (1, 2), 20))
    for _ in range(6):
        unified.tick()
    unified.engine.inbox.post(Cancel("cancelled", 0))
    unified.tick()
    metrics = unified.engine.metrics
    assert read(metrics, "request_queue_seconds_count") == 2
    assert read(metrics, "request_queue_seconds_sum") == pytest.approx(0.04 + 0.06, abs=0.001)
    assert read(metrics, "request_decode_seconds_count") == 0
    assert [type(output.error) for output in unified.outputs if output.finish] == [DeadlineExceeded]
    unified.run()
