"""Pieces that come, and wait for their engine, lie beside its pool: there is only so much of them, over whichever backends."""

from __future__ import annotations

import logging
import queue
import re
import threading
from dataclasses import replace
from math import inf
from time import monotonic, sleep

import numpy as np
import pytest

from jdisagg.handoff.messages import HandoffId
from jdisagg.transfer import jax_server, lanes
from jdisagg.transfer.base import Piece, PieceArrived, PieceFailed, Published, TransferEvent
from jdisagg.transfer.grpc_backend import PieceStore
from jdisagg.transfer.host_backend import host_fetcher, host_publisher
from jdisagg.transfer.lanes import FetchJob, LaneFetcher
from jdisagg.transfer.room import Room, Taken
from jdisagg.transfer.target import PieceError
from tests.unit.transfer.lane_kit import READY
from tests.unit.transfer.rig import CHUNK_TOKENS, TARGET, H, LocalSource, Rig, piece, tokens


def never_comes(events: queue.SimpleQueue[TransferEvent]) -> bool:
    sleep(0.1)
    return events.empty()


@pytest.mark.parametrize("kind", ["grpc", "tcp", "shm", "jax", "device_put"])
def test_the_next_piece_comes_when_the_engine_has_taken_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, refused, take = [100.0], threading.Event(), Room.take

    def noted(room: Room, num_tokens: int, *, is_ahead: bool = False) -> Taken | None:
        if (taken := take(room, num_tokens, is_ahead=is_ahead)) is None and not is_ahead:
            refused.set()
        return taken

    monkeypatch.setattr(Room, "take", noted)
    monkeypatch.setattr(lanes, "monotonic", lambda: now_s[0])
    rig = Rig(kind).start(most_tokens=CHUNK_TOKENS)
    first, second = (rig.published(key, piece(tokens(1))) for key in ("a", "b"))
    for ready in (first, second):
        rig.fetcher.fetch(H, rig.peer, ready, monotonic() + 60.0)
    arrived = rig.events.get(timeout=30.0)
    assert isinstance(arrived, PieceArrived)
    assert arrived.ready == first
    assert never_comes(rig.events), "one waits already"
    assert refused.wait(30.0), "it waits for room"
    now_s[0] += 10.0
    del arrived
    assert isinstance(following := rig.events.get(timeout=30.0), PieceArrived)
    assert following.ready == second
    assert following.seconds < 1.0, "it takes the network no longer than the engine lets it wait"
    rig.close()


@pytest.mark.parametrize("kind", ["grpc", "shm", "jax", "device_put"])
def test_however_many_peers_send_no_more_pieces_lie_on_the_device_than_it_has_room_for(kind: str) -> None:
    rig = Rig(kind).start(most_tokens=2 * CHUNK_TOKENS)
    readies = [rig.published(f"k{index}", piece(tokens(CHUNK_TOKENS))) for index in range(5)]
    for index, ready in enumerate(readies):
        rig.fetcher.fetch(H, f"{rig.peer}{index}", ready, monotonic() + 60.0)
    arrived = [rig.events.get(timeout=30.0) for _ in range(2)]
    assert never_comes(rig.events)
    for _ in readies[2:]:
        del arrived[0]
        arrived.append(rig.events.get(timeout=30.0))
        assert never_comes(rig.events)
    assert all(isinstance(event, PieceArrived) for event in arrived)
    rig.close()


def test_what_comes_over_several_backends_shares_the_room() -> None:
    target = replace(TARGET, room=Room(CHUNK_TOKENS))
    posted, store = queue.SimpleQueue[TransferEvent](), PieceStore()
    publisher = host_publisher("grpc", store, posted.put)
    fetchers = [host_fetcher(name, LocalSource(store), target, posted.put) for name in ("one", "two")]
    readies = []
    for key in "ab":
        publisher.publish(H, key, piece(tokens(1)))
        published = posted.get(timeout=30.0)
        assert isinstance(published, Published)
        readies.append(published.ready)
    for fetcher, ready in zip(fetchers, readies, strict=True):
        fetcher.fetch(H, "p:1", ready, monotonic() + 60.0)
    arrived = posted.get(timeout=30.0)
    assert isinstance(arrived, PieceArrived)
    assert never_comes(posted)
    del arrived
    assert isinstance(posted.get(timeout=30.0), PieceArrived)
    for end in (*fetchers, publisher):
        end.close()


def test_a_piece_that_did_not_come_leaves_its_room_to_others() -> None:
    rig = Rig("jax").start(most_tokens=CHUNK_TOKENS)
    bad, good = (rig.published(key, piece(tokens(CHUNK_TOKENS))) for key in "ab")
    assert isinstance(rig.failed(replace(bad, checksum=bad.checksum ^ 1)), PieceFailed)
    rig.arrived(good)
    rig.close()


def test_a_peer_that_is_not_reached_keeps_no_room_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find that nobody accepts a connection takes two seconds: after one a peer that waits for room counts as late."""
    rig = Rig("jax").start(most_tokens=CHUNK_TOKENS)
    silent, quick = (rig.published(key, piece(tokens(CHUNK_TOKENS))) for key in "ab")
    reaching, given_up, reach = threading.Event(), threading.Event(), jax_server._try

    def slow_try(address: str, deadline_s: float) -> None:
        if address != quick.locator.partition(" ")[0]:
            reaching.set()
            given_up.wait(60.0)
            raise PieceError("unreachable", address)
        reach(address, deadline_s)

    monkeypatch.setattr(jax_server, "_try", slow_try)
    rig.fetcher.fetch(H, "nobody:1", replace(silent, locator=silent.locator.replace("127.0.0.1:", "127.0.0.2:")), inf)
    assert reaching.wait(30.0)
    rig.fetcher.fetch(H, rig.peer, quick, monotonic() + 25.0)
    event = rig.event()
    given_up.set()
    rig.close()
    assert isinstance(event, PieceArrived), event


def test_what_cannot_be_pulled_again_does_not_wait_for_room_to_say_so() -> None:
    rig = Rig("jax").start(most_tokens=CHUNK_TOKENS)
    ready = rig.published("k", piece(tokens(CHUNK_TOKENS)))
    rig.fetcher.fetch(H, rig.peer, ready, monotonic() + 60.0)
    arrived = rig.event()
    assert isinstance(arrived, PieceArrived)  # and all the room is its own
    rig.fetcher.fetch(H, rig.peer, ready, monotonic() + 20.0)
    again = rig.event()
    rig.close()
    assert isinstance(again, PieceFailed)
    assert again.reason == "unknown_key"
    del arrived


class Small:
    """Obtains pieces of one token, in room for one of them."""

    def __init__(self) -> None:
        self.room = Room(1)

    def __call__(self, job: FetchJob) -> Piece:
        return Piece(begin=0, end=1, data=np.zeros(1), taken=job.await_room(self.room, 1))


def test_a_peer_that_is_slow_keeps_no_room_from_others() -> None:
    posted, slow, small = queue.SimpleQueue[TransferEvent](), threading.Event(), Small()

    def obtain(job: FetchJob) -> Piece:
        if job.peer == "slow:1":
            slow.wait(60.0)
        return small(job)

    fetches = LaneFetcher("test", obtain, posted.put)
    for peer in ("slow:1", "quick:1", "quick:1"):
        fetches.fetch(HandoffId(peer, 1), peer, READY, monotonic() + 60.0)
    for _ in range(2):
        assert posted.get(timeout=30.0).handoff.request_id == "quick:1"
    slow.set()
    fetches.close()


def test_the_log_counts_no_wait_for_the_engine_as_a_fetch(caplog: pytest.LogCaptureFixture) -> None:
    """What passed while the prompt was still computed is read from it."""
    caplog.set_level(logging.DEBUG, logger="jdisagg.transfer.lanes")
    posted, small = queue.SimpleQueue[TransferEvent](), Small()
    fetches = LaneFetcher("test", small, posted.put)
    taken = small.room.take(1)
    fetches.fetch(H, "p:1", READY, monotonic() + 60.0)
    sleep(0.5)
    del taken
    arrived = posted.get(timeout=30.0)
    fetches.close()
    assert isinstance(arrived, PieceArrived)
    began_s, ended_s = map(float, re.findall(r"from ([\d.]+) to ([\d.]+)$", caplog.messages[0])[0])
    assert ended_s - began_s == pytest.approx(arrived.seconds, abs=1e-5)


def test_a_fetch_that_waits_for_the_engine_ends_with_its_time() -> None:
    posted = queue.SimpleQueue[TransferEvent]()
    fetches = LaneFetcher("test", Small(), posted.put)
    fetches.fetch(HandoffId("first", 1), "p:1", READY, monotonic() + 60.0)
    first = posted.get(timeout=30.0)
    fetches.fetch(HandoffId("late", 1), "p:1", READY, monotonic() + 0.05)
    late = posted.get(timeout=30.0)
    assert isinstance(late, PieceFailed)
    assert (late.handoff.request_id, late.reason) == ("late", "timeout")
    assert isinstance(first, PieceArrived)
    fetches.close()


def test_closing_waits_for_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "CLOSE_TIMEOUT_S", 60.0)
    posted = queue.SimpleQueue[TransferEvent]()
    fetches = LaneFetcher("test", Small(), posted.put)
    for name in ("first", "second"):
        fetches.fetch(HandoffId(name, 1), "p:1", READY, monotonic() + 60.0)
    first = posted.get(timeout=30.0)
    began_s = monotonic()
    fetches.close()
    assert monotonic() - began_s < 30.0
    assert isinstance(first, PieceArrived)
    assert posted.empty()
