"""What is counted of pieces that came or did not, and the share of the transfer that nobody waited for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from jdisagg.core.errors import DeadlineExceeded
from jdisagg.core.metrics import Metrics
from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.roles import engine_loop
from jdisagg.roles.inbox import Message
from jdisagg.roles.transfers import HiddenTransfers, Transfers
from jdisagg.transfer.base import PieceArrived, PieceFailed
from tests.unit.handoff.rig import ready
from tests.unit.roles.measured import read
from tests.unit.roles.network_fake import FakeFetcher
from tests.unit.roles.second_turn import first_turn
from tests.unit.roles.world import World
from tests.unit.sched.engine_fake import request


def test_pieces_are_counted_by_backend_and_those_that_did_not_come_by_reason_and_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = Metrics()
    transfers, handoff, piece = Transfers(metrics), HandoffId("r", 1), cast(Any, None)
    for backend, seconds in (("shm", 0.5), ("shm", 0.25), ("tcp", 2.0)):
        transfers.arrived(PieceArrived(handoff=handoff, ready=ready("k", 0, 4, backend), piece=piece, seconds=seconds))
    transfers.failed(PieceFailed(handoff=handoff, ready=ready("lost", 4, 8, "tcp"), reason="checksum", detail="of its host"))
    size = ready("k", 0, 4).num_bytes
    assert [read(metrics, "transfer_bytes_total", backend=name) for name in ("shm", "tcp")] == [2 * size, size]
    assert [read(metrics, "transfer_seconds_sum", backend=name) for name in ("shm", "tcp")] == [0.75, 2.0]
    assert read(metrics, "transfer_failures_total", backend="tcp", reason="checksum") == 1
    assert caplog.messages == ["request r: piece lost over tcp: checksum of its host"]


def test_fetches_that_end_with_their_request_s_time_are_neither_counted_nor_in_the_log_nor_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_loop, "IDLE_WAIT_S", 0.0)
    monkeypatch.setattr(engine_loop, "LISTEN_S", 0.0)
    world, deadlines = World(local_prefill=False), list[float]()

    def expire(self: FakeFetcher, handoff: HandoffId, peer: str, ready: ChunkReady, deadline_s: float) -> None:
        deadlines.append(deadline_s)
        world.now_s = max(world.now_s, deadline_s - 0.1)
        self._inbox.post(PieceFailed(handoff=handoff, ready=ready, reason="timeout", detail="the deadline passed"))

    monkeypatch.setattr(FakeFetcher, "fetch", expire)
    world.submit(replace(request("a", tuple(range(3, 22)), 6), deadline_s=2.0))
    world.settle()
    assert deadlines
    assert set(deadlines) == {2.0}
    assert isinstance(world.outputs["a"][-1].error, DeadlineExceeded)
    metrics = world.decode.metrics
    assert read(metrics, "transfer_failures_total", backend="fake", reason="timeout") == 0
    assert read(metrics, "recoveries_total", rung="refetch") == 0
    assert [told for told in caplog.messages if "piece" in told] == []


def test_what_p_fetches_for_a_request_whose_time_is_over_is_neither_counted_nor_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_loop, "IDLE_WAIT_S", 0.0)
    monkeypatch.setattr(engine_loop, "LISTEN_S", 0.0)
    world, fetch = World(local_prefill=False, want_min_tokens=4), FakeFetcher.fetch
    prompt, deadline_s = first_turn(world), world.now_s + 2.0
    deadlines = list[float]()

    def expire(self: FakeFetcher, handoff: HandoffId, peer: str, ready: ChunkReady, until_s: float) -> None:
        if not self._to_prefill:
            fetch(self, handoff, peer, ready, until_s)
            return
        deadlines.append(until_s)
        world.now_s = max(world.now_s, until_s - 0.1)  # the clock was looked at before the inbox was
        self._inbox.post(PieceFailed(handoff=handoff, ready=ready, reason="timeout", detail="the deadline passed"))

    monkeypatch.setattr(FakeFetcher, "fetch", expire)
    world.submit(replace(request("t2", prompt, 4, ignore_eos=True), deadline_s=deadline_s))
    world.settle()
    assert deadlines
    assert max(deadlines) == pytest.approx(deadline_s)
    assert read(world.prefill.metrics, "transfer_failures_total", backend="fake", reason="timeout") == 0
    assert [told for told in caplog.messages if "piece" in told] == []


def hidden(computed_s: float | None, *arrivals: tuple[float, float]) -> float:
    """Hidden seconds of pieces (seconds, now_s) around the first token at `computed_s`."""
    metrics = Metrics()
    transfers = HiddenTransfers(metrics)
    told = False
    for seconds, now_s in arrivals:
        if computed_s is not None and now_s >= computed_s and not told:
            transfers.computed("r", computed_s)
            transfers.computed("r", computed_s + 9)  # said again by a later stream: it counts from the first time
            told = True
        transfers.arrived("r", seconds, now_s)
    transfers.forget("r")
    transfers.forget("r")
    assert not transfers._computed_s
    return metrics.transfer.hidden_seconds._value.get()


def test_pieces_are_hidden_as_far_as_the_first_token_was_not_known() -> None:
    assert hidden(None, (0.5, 1.0), (0.25, 2.0)) == pytest.approx(0.75)
    assert hidden(3.0, (0.5, 1.0), (1.0, 3.25), (0.5, 4.0)) == pytest.approx(0.5 + 0.75)
    assert hidden(1.0, (0.5, 2.0)) == 0


def test_a_piece_that_comes_too_late_or_twice_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "IDLE_WAIT_S", 0.0)
    monkeypatch.setattr(engine_loop, "LISTEN_S", 0.0)
    world, arrived = World(local_prefill=False), []
    post = world.decode.inbox.post

    def note(message: Message) -> None:
        if isinstance(message, PieceArrived):
            message = replace(message, seconds=0.25)
            arrived.append(message)
        post(message)

    monkeypatch.setattr(world.decode.inbox, "post", note)
    world.submit(request("a", tuple(range(3, 22)), 6))
    world.settle()
    hidden_s = world.decode.metrics.transfer.hidden_seconds._value.get()
    assert len(arrived) > 1
    assert 0 < hidden_s < 0.25 * len(arrived), "the last ones came after the first token"
    for message in arrived:
        post(message)
    world.settle()
    assert world.decode.metrics.transfer.hidden_seconds._value.get() == hidden_s


def test_kv_that_comes_again_after_a_retraction_is_hidden_until_its_token_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "IDLE_WAIT_S", 0.0)
    monkeypatch.setattr(engine_loop, "LISTEN_S", 0.0)
    world, arrived = World(local_prefill=False, decode_pages=14, reserved_decode_tokens=0, caching=False), list[float]()
    post, metrics = world.decode.inbox.post, world.decode.metrics

    def note(message: Message) -> None:
        if isinstance(message, PieceArrived):
            message = replace(message, seconds=0.1)
            arrived.append(message.seconds)
        post(message)

    monkeypatch.setattr(world.decode.inbox, "post", note)
    for name in "ab":
        world.submit(request(name, (ord(name), *range(3, 19)), 14))
    while not metrics.engine.retractions._value.get():
        world.tick()
    world.prefill.scheduler.reset_prefix_cache()  # else P has all of it at once, and its token with it
    num_before, before_s = len(arrived), metrics.transfer.hidden_seconds._value.get()
    world.settle()
    assert len(arrived) > num_before + 1, "more than one piece came again"
    assert metrics.transfer.hidden_seconds._value.get() > before_s
