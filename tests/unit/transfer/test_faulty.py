"""The fault-injecting wrappers produce the faults they name, on real backends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from jdisagg.handoff.messages import HandoffId
from jdisagg.transfer import faulty
from jdisagg.transfer.base import PieceArrived, PieceFailed, PublishFailed
from jdisagg.transfer.faulty import Fault, FaultyByteSource, FaultyFetcher
from jdisagg.transfer.host_backend import host_fetcher, host_publisher
from tests.unit.transfer.fake import FakeFetcher
from tests.unit.transfer.rig import FEATURES, HEADS, LAYERS, TARGET, H, LocalSource, Rig, piece, tokens


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig("fake").start()
    yield rig
    rig.close()


def faulty_fetcher(rig: Rig, *plan: Fault | None) -> FaultyFetcher:
    rig.fetcher = FaultyFetcher(lambda post: FakeFetcher(rig.network, TARGET, post), rig.events.put, plan)
    return rig.fetcher


def test_a_failing_fetch_says_why_and_the_next_one_works(rig: Rig) -> None:
    faulty_fetcher(rig, Fault.ERROR_ARRAY)
    ready = rig.published("k", piece(tokens(5)))
    assert rig.failed(ready).reason == "device"
    assert rig.arrived(ready).ready == ready


def test_late_and_duplicate_events(rig: Rig) -> None:
    fetcher = faulty_fetcher(rig, Fault.DUPLICATE, Fault.LATE)
    ready = rig.published("k", piece(tokens(5)))
    rig.fetch(ready)
    assert rig.event() == rig.event(), "duplicate"
    rig.fetch(ready)
    assert rig.quiet(0.0), "late"
    fetcher.cancel(HandoffId("other", 1))
    assert rig.quiet(0.0), "another hand-off's end"
    fetcher.cancel(H)
    assert isinstance(rig.event(), PieceArrived)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.CORRUPT, "checksum"),
        (Fault.SCRAMBLE, "checksum"),
        (Fault.TRUNCATE, "truncated"),
        (Fault.DISCONNECT, "connection"),
        (Fault.MISSING, "unknown_key"),
    ],
)
def test_spoiled_bytes_are_noticed_by_the_grpc_fetcher(fault: Fault, reason: str) -> None:
    rig = Rig("grpc")
    rig.publisher = host_publisher("grpc", rig.store, rig.events.put)
    rig.fetcher = host_fetcher("grpc", FaultyByteSource(LocalSource(rig.store), [fault]), TARGET, rig.events.put)
    sent = tokens(5)
    ready = rig.published("k", piece(sent))
    failed = rig.failed(ready)
    assert failed.reason == reason, failed
    assert np.array_equal(np.asarray(rig.arrived(ready).piece.data)[:, :5], sent)
    rig.close()


def test_a_wrong_announcement_is_not_believed() -> None:
    rig = Rig("grpc").start()
    ready = rig.published("k", piece(tokens(5)))
    longer = replace(ready, end=ready.end + 1, shape=(LAYERS, 6, HEADS, FEATURES), num_bytes=ready.num_bytes // 5 * 6)
    assert rig.failed(longer).reason == "truncated"
    shorter = replace(ready, end=ready.end - 1, shape=(LAYERS, 4, HEADS, FEATURES), num_bytes=ready.num_bytes // 5 * 4)
    assert rig.failed(shorter).reason == "truncated"
    rig.close()


def test_without_checksums_the_announcement_says_none() -> None:
    rig = Rig("grpc").start()
    rig.publisher.close()
    rig.publisher = host_publisher("grpc", rig.store, rig.events.put, checksums=False)
    ready = rig.published("k", piece(tokens(5)))
    assert ready.checksum == 0
    rig.arrived(ready)
    rig.close()


def test_a_stalled_peer_does_not_hold_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("grpc")
    rig.publisher = host_publisher("grpc", rig.store, rig.events.put)
    begun, goes_on = threading.Event(), threading.Event()

    def stalled(_: float) -> None:
        begun.set()
        goes_on.wait(60.0)

    monkeypatch.setattr(faulty, "sleep", stalled)
    source = FaultyByteSource(LocalSource(rig.store), [Fault.SLOW])
    rig.fetcher = host_fetcher("grpc", source, TARGET, rig.events.put)
    ready = rig.published("k", piece(tokens(5)))
    deadline_s = time.monotonic() + 60.0
    rig.fetcher.fetch(H, "slow", ready, deadline_s)
    assert begun.wait(30.0)
    rig.fetcher.fetch(HandoffId("fast", 2), "fast", ready, deadline_s)
    event = rig.event()
    assert event.handoff == HandoffId("fast", 2)
    goes_on.set()
    assert isinstance(rig.event(), PieceArrived)
    assert not isinstance(event, PieceFailed | PublishFailed)
    rig.close()
