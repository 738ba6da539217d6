"""The drill's wrappers make the faults they are asked for, and hand everything through when they are asked for none."""

from __future__ import annotations

import numpy as np

from jdisagg.core.drill import Drill
from jdisagg.core.requests import Output
from jdisagg.handoff.events import FromPrefill
from jdisagg.handoff.messages import Accepted, ChunkReady, Done, HandoffId
from jdisagg.transfer.base import PieceFailed
from jdisagg.transfer.drill import KeepingPublisher, TransferDrill
from jdisagg.transfer.faulty import FaultyByteSource
from jdisagg.transfer.host_backend import host_fetcher, host_publisher
from jdisagg.transfer.lanes import LaneFetcher
from tests.unit.transfer.rig import TARGET, LocalSource, Rig, piece, tokens

CHUNK = ChunkReady(key="k", begin=0, end=4, shape=(1, 4, 1, 2), dtype="float32", num_bytes=32, checksum=1)


def test_without_a_drill_the_real_parts_stay_bare() -> None:
    rig, drill = Rig("grpc").start(), TransferDrill(Drill())
    source = LocalSource(rig.store)
    assert drill.byte_source(source) is source
    assert drill.publisher(rig.publisher) is rig.publisher
    rig.fetcher.close()
    rig.fetcher = drill.fetcher(lambda post: host_fetcher("grpc", source, TARGET, post), rig.events.put)
    assert isinstance(rig.fetcher, LaneFetcher)
    post = rig.events.put
    assert drill.messages(post) is post
    rig.close()


def test_every_second_read_is_scrambled_and_noticed_by_its_checksum() -> None:
    rig, drill = Rig("grpc"), TransferDrill(Drill(rates={"scramble": 0.5}))
    source = drill.byte_source(LocalSource(rig.store))
    assert isinstance(source, FaultyByteSource)
    rig.publisher = host_publisher("grpc", rig.store, rig.events.put)
    rig.fetcher = host_fetcher("grpc", source, TARGET, rig.events.put)
    ready = rig.published("k", piece(tokens(5)))
    events = []
    for _ in range(8):
        rig.fetch(ready)
        events.append(rig.event())
    reasons = [event.reason if isinstance(event, PieceFailed) else "arrived" for event in events]
    assert sorted(reasons) == ["arrived"] * 4 + ["checksum"] * 4
    rig.close()


def test_without_checksums_a_scrambled_piece_is_taken_for_a_good_one() -> None:
    rig, drill = Rig("grpc"), TransferDrill(Drill(rates={"scramble": 1.0}))
    rig.publisher = host_publisher("grpc", rig.store, rig.events.put, checksums=False)
    rig.fetcher = host_fetcher("grpc", drill.byte_source(LocalSource(rig.store)), TARGET, rig.events.put)
    sent = tokens(5)
    got = np.asarray(rig.arrived(rig.published("k", piece(sent))).piece.data)[:, :5]
    assert not np.array_equal(got, sent)
    assert np.isfinite(got).all()
    rig.close()


def test_a_publisher_that_ignores_leases_keeps_everything() -> None:
    rig, drill = Rig("grpc").start(), TransferDrill(Drill(rates={"leases_ignored": 1.0}))
    rig.publisher.close()
    rig.publisher = drill.publisher(host_publisher("grpc", rig.store, rig.events.put))
    assert isinstance(rig.publisher, KeepingPublisher)
    ready = rig.published("k", piece(tokens(5)))
    rig.publisher.discard("k")
    assert rig.publisher.num_buffered_bytes == ready.num_bytes
    rig.close()


def test_announcements_come_twice_and_the_last_word_of_a_replaced_stream_once_more() -> None:
    got: list[FromPrefill] = []
    post = TransferDrill(Drill(rates={"duplicate_message": 1.0, "late_message": 1.0})).messages(got.append)
    old, new, other = HandoffId("a", 1), HandoffId("a", 2), HandoffId("b", 3)
    accepted, done = Accepted(cached_tokens=0), Done(first=Output(request_id="b"), num_chunks=1)
    for event in (FromPrefill(old, CHUNK), FromPrefill(other, done), FromPrefill(new, accepted), FromPrefill(new, CHUNK)):
        post(event)
    chunk = FromPrefill(old, CHUNK)
    assert got[:2] == [chunk, chunk]
    assert got[2:5] == [FromPrefill(other, done), FromPrefill(new, accepted), chunk]
    assert got[5:] == [FromPrefill(new, CHUNK)] * 2
