"""Several pieces on their way over one connection of backend "jax": what becomes of one costs the others nothing."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest

from jdisagg.core.config import TransferConfig
from jdisagg.handoff.credit import most_arriving_of
from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.transfer import jax_server, lanes
from jdisagg.transfer.base import PieceArrived, PieceFailed
from jdisagg.transfer.cut import token_buckets
from jdisagg.transfer.jax_backend import PULLS_AHEAD, _Begun, jax_fetcher
from jdisagg.transfer.jax_server import TransferServers
from jdisagg.transfer.lanes import FetchJob, LaneFetcher
from jdisagg.transfer.room import Room
from jdisagg.transfer.target import PieceError
from tests.unit.transfer.rig import CHUNK_TOKENS, HEADS, TARGET, H, Rig, joiner, piece, tokens, transfer_servers
from tests.unit.waiting import until

BUCKETS = token_buckets(CHUNK_TOKENS)
GONE, SILENT = HandoffId("gone", 1), HandoffId("silent", 1)


def published(rig: Rig, num_pieces: int) -> list[ChunkReady]:
    return [rig.published(f"k{index}", piece(tokens(5, seed=index))) for index in range(num_pieces)]


def renamed(ready: ChunkReady, uuid: str) -> ChunkReady:
    """With another uuid in its locator."""
    where, _, *rest = ready.locator.split(" ")
    return replace(ready, locator=" ".join([where, uuid, *rest]))


def queued(rig: Rig) -> list[FetchJob]:
    assert isinstance(rig.fetcher, LaneFetcher)
    return rig.fetcher._unfinished()


def is_through(job: FetchJob) -> bool:
    return isinstance(job.begun, _Begun) and job.begun.pull.is_through


def outcomes(rig: Rig, readies: Sequence[ChunkReady]) -> list[str]:
    """What comes of fetching these, all of them queued before the first begins."""
    assert isinstance(rig.fetcher, LaneFetcher)
    gate = threading.Event()
    rig.fetcher._lane(rig.peer).submit(lambda: gate.wait(30.0) and None)
    for ready in readies:
        rig.fetch(ready)
    gate.set()
    events = [rig.event() for _ in readies]
    return [event.reason if isinstance(event, PieceFailed) else "arrived" for event in events]


def test_the_next_pieces_arrive_while_one_is_waited_for() -> None:
    rig = Rig("jax").start()
    readies = published(rig, PULLS_AHEAD + 2)
    rig.fetch(renamed(readies[0], "abc"), SILENT, within_s=120.0)
    for ready in readies[1:]:
        rig.fetch(ready, within_s=120.0)
    jobs = queued(rig)
    until(lambda: all(is_through(job) for job in jobs[1:-1]))
    assert jobs[-1].begun is None, "more on its way than is kept in memory"
    rig.fetcher.cancel(SILENT)
    events = [rig.event() for _ in readies[1:]]
    assert [event.ready.key for event in events if isinstance(event, PieceArrived)] == [one.key for one in readies[1:]]
    rig.close()


def test_what_is_pulled_ahead_of_its_turn_leaves_room_to_other_peers() -> None:
    """It lies on the device from the begin of its pull on, and whoever sends the piece before it may be slow."""
    rig = Rig("jax").start(most_tokens=4 * CHUNK_TOKENS)
    *slow, quick = (rig.published(f"k{index}", piece(tokens(CHUNK_TOKENS))) for index in range(PULLS_AHEAD + 2))
    rig.fetch(renamed(slow[0], "aba"), SILENT, within_s=120.0)
    for ready in slow[1:]:
        rig.fetch(ready, SILENT, within_s=120.0)
    jobs = queued(rig)
    until(lambda: is_through(jobs[1]))
    rig.fetcher.fetch(H, "another", quick, time.monotonic() + 120.0)
    assert rig.event().ready.key == quick.key
    assert [job.begun is not None for job in jobs[1:]] == [True, False, False]
    rig.fetcher.cancel(SILENT)
    rig.close()


@pytest.mark.parametrize("num_pieces", range(1, 20))
def test_however_small_the_buffer_one_peer_never_takes_all_the_room_of_another_s_largest_piece(num_pieces: int) -> None:
    """Two chunks: slabs, and what is made of them. From the first peer nothing may come, for as long as it is waited for."""
    config = TransferConfig(transfer_chunk_tokens=CHUNK_TOKENS, transfer_buffer_bytes=num_pieces * CHUNK_TOKENS)
    for tokens_of_each in itertools.product((CHUNK_TOKENS, *(CHUNK_TOKENS + bucket for bucket in BUCKETS)), repeat=2):
        room = Room(most_arriving_of(config, bytes_per_token=1) * CHUNK_TOKENS)
        first, following = tokens_of_each
        taken = [room.take(first), *(room.take(following, is_ahead=True) for _ in range(PULLS_AHEAD))]
        assert room.take(2 * CHUNK_TOKENS) is not None, (tokens_of_each, taken)


def test_those_that_are_not_begun_yet_are_not_walked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits looks every 0.5 ms: with 1,000 of them queued it took 28 us each time."""
    looks: list[FetchJob] = []

    class Noted(FetchJob):
        __slots__ = ()

        def __getattribute__(self, name: str) -> object:
            if name == "begun":
                looks.append(self)
            return super().__getattribute__(name)

    monkeypatch.setattr(lanes, "FetchJob", Noted)
    rig = Rig("jax").start()
    (ready,) = published(rig, 1)
    for serial in range(50):
        rig.fetch(renamed(ready, f"ad{serial:02x}"), SILENT, within_s=120.0)
    ahead = queued(rig)[1 : PULLS_AHEAD + 1]
    until(lambda: all(job.begun for job in ahead))
    looks.clear()
    until(lambda: len(looks) > 100)
    num_walked = len(set(looks))
    rig.fetcher.cancel(SILENT)
    rig.close()
    assert num_walked == PULLS_AHEAD


def test_what_was_cancelled_takes_nobodys_place_on_the_way() -> None:
    rig = Rig("jax").start()
    readies = published(rig, PULLS_AHEAD + 2)
    rig.fetch(renamed(readies[0], "abd"), SILENT, within_s=120.0)
    for ready in readies[1:-1]:
        rig.fetch(ready, GONE)
    rig.fetcher.cancel(GONE)
    rig.fetch(readies[-1], within_s=120.0)
    job = queued(rig)[-1]
    until(lambda: job.begun)
    rig.fetcher.cancel(SILENT)
    assert isinstance(rig.event(), PieceArrived)
    rig.close()


def test_pulls_of_a_hand_off_that_has_ended_all_end_though_nothing_comes() -> None:
    """What comes of them would lie on the device, where they have given back their room."""
    rig = Rig("jax").start()
    (ready,) = published(rig, 1)
    for serial in range(PULLS_AHEAD + 1):
        rig.fetch(renamed(ready, f"af{serial}"), SILENT, within_s=120.0)
    jobs = queued(rig)
    until(lambda: all(job.begun for job in jobs))
    assert isinstance(jobs[0].begun, _Begun)
    connection = jobs[0].begun.connection
    rig.fetcher.cancel(SILENT)
    ends_s = time.monotonic() + lanes.IDLE_S / 2
    while connection.is_open and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert not connection.is_open
    rig.close()


def test_one_whose_time_is_up_before_its_turn_is_told_to_have_been_on_its_way() -> None:
    rig = Rig("jax").start()
    readies = published(rig, 2)
    rig.fetch(renamed(readies[0], "ac1"), SILENT, within_s=120.0)
    rig.fetch(readies[1], within_s=1.0)
    _, job = queued(rig)
    until(lambda: job.begun and time.monotonic() > job.deadline_s)
    rig.fetcher.cancel(SILENT)
    said = "the deadline passed while it was on its way, behind others"
    assert rig.event() == PieceFailed(handoff=job.handoff, ready=readies[1], reason="timeout", detail=said)
    rig.close()


def test_one_that_is_damaged_costs_itself_alone() -> None:
    rig = Rig("jax").start()
    readies = published(rig, 5)
    readies[1] = replace(readies[1], checksum=readies[1].checksum ^ 1)
    assert outcomes(rig, readies) == ["arrived", "checksum", "arrived", "arrived", "arrived"]
    rig.close()


def test_one_that_is_withdrawn_costs_itself_alone() -> None:
    rig = Rig("jax").start()
    readies = published(rig, 5)
    rig.publisher.discard(readies[2].key)
    rig.published("last", piece(tokens(5)))  # by then it is
    assert outcomes(rig, readies) == ["arrived", "arrived", "unknown_key", "arrived", "arrived"]
    rig.close()


@pytest.mark.parametrize("uuid", ["-1", "1" + 16 * "0"])
def test_a_uuid_that_is_none_costs_its_own_piece_alone(uuid: str) -> None:
    rig = Rig("jax").start()
    first, bad, last = published(rig, 3)
    assert outcomes(rig, [first, renamed(bad, uuid), last]) == ["arrived", "device", "arrived"]
    rig.close()


def test_what_comes_behind_a_piece_from_another_server_waits_for_its_turn() -> None:
    """To connect to that one ends the connection to the other, and what is on its way over it. Hand-offs of one peer are on two
    servers when they came over two connections."""
    rig = Rig("jax").start()
    sent = [replace(piece(tokens(5)), receiver=receiver) for receiver in ("d:1", "d:1", "d:2", "d:1")]
    readies = [rig.published(f"k{index}", one) for index, one in enumerate(sent)]
    assert len({ready.locator.partition(" ")[0] for ready in readies}) == 2
    rig.fetch(renamed(readies[0], "abe"), SILENT, within_s=120.0)
    for ready in readies[1:]:
        rig.fetch(ready, within_s=120.0)
    _, same, other, behind = queued(rig)
    until(lambda: same.begun)
    time.sleep(0.05)  # a hundred looks at what is queued
    assert (other.begun, behind.begun) == (None, None)
    rig.fetcher.cancel(SILENT)
    assert [type(rig.event()) for _ in readies[1:]] == [PieceArrived] * 3
    rig.close()


def test_a_worker_with_more_sockets_pulls_from_one_with_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `agree` lets them; the other way around it would end the process."""
    rig = Rig("jax").start()
    readies = published(rig, 5)
    monkeypatch.setattr(jax_server, "NUM_ADDRESSES", jax_server.NUM_ADDRESSES + 2)
    servers = TransferServers([*TARGET.sharding.device_set], "127.0.0.1")
    rig.fetcher.close()
    rig.fetcher = jax_fetcher(servers, joiner("float32", CHUNK_TOKENS, HEADS), TARGET, rig.events.put)
    assert outcomes(rig, readies) == ["arrived"] * 5
    rig.close()


@pytest.mark.parametrize("nothing_came_s", [0.0, 60.0])
def test_a_request_whose_time_is_up_costs_others_their_pieces_only_where_nothing_comes(
    nothing_came_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = transfer_servers()
    server, device = ours.start(), jax.devices()[0]
    connection = theirs.connect(server.address)
    sent = [jax.block_until_ready(jax.device_put(np.full(8, 3.0, np.float32), device))]
    specs = [jax.ShapeDtypeStruct((8,), np.float32, sharding=jax.sharding.SingleDeviceSharding(device))]
    ends_s = time.monotonic() + 60.0
    hurried, patient = connection.begin(0xABF, specs, ends_s), connection.begin(0xAC0, specs, ends_s)
    connection._came_s -= nothing_came_s
    monkeypatch.setattr(jax_server, "_STILL_S", 30.0)  # nor does it matter that this process stands still for a moment
    with pytest.raises(PieceError, match="in time"):
        connection.end(hurried, time.monotonic() + 0.1)
    monkeypatch.setattr(jax_server.secrets, "randbits", lambda num: 0xAC0)
    server.offer(sent)
    if nothing_came_s:
        with pytest.raises(PieceError, match="connection"):
            connection.end(patient, ends_s)
    else:
        assert np.asarray(connection.end(patient, ends_s)[0])[0] == 3.0
    connection.drop()
    server.withdraw(sent)
