"""The wrapper around JAX's transfer server: what would kill, corrupt or hang cannot be reached."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import jax
import numpy as np
import pytest

from jdisagg.core.config import ServerConfig, TransferConfig
from jdisagg.core.host_names import Address, is_own
from jdisagg.transfer import jax_receivers, jax_server, lanes
from jdisagg.transfer.jax_server import TransferConnection, TransferServer, TransferServers, Unsupported
from jdisagg.transfer.lanes import LaneFetcher
from jdisagg.transfer.publisher import LanePublisher
from jdisagg.transfer.target import PieceError
from tests.unit.transfer.rig import Rig, error_array, piece, tokens, transfer_servers
from tests.unit.waiting import until

ONE = jax.sharding.SingleDeviceSharding


def array(value: float, size: int = 64, device: int = 0) -> jax.Array:
    return jax.block_until_ready(jax.device_put(np.full(size, value, np.float32), jax.devices()[device]))


def spec(size: int = 64, device: int = 5) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), np.float32, sharding=ONE(jax.devices()[device]))


def pull(connection: TransferConnection, uuid: int, within_s: float = 30.0) -> np.ndarray:
    ends_s = time.monotonic() + within_s
    (got,) = connection.end(connection.begin(uuid, [spec()], ends_s), ends_s)
    return np.asarray(got)


@pytest.fixture(scope="module")
def ours() -> TransferServer:
    return transfer_servers()[0].start()


@pytest.fixture
def connection(ours: TransferServer) -> TransferConnection:
    return transfer_servers()[1].connect(ours.address)


@pytest.mark.parametrize(("host", "wanted"), [("localhost", "127.0.0.1:"), ("127.0.0.1", "127.0.0.1:"), ("[::1]", "[::1]:")])
def test_a_name_becomes_an_address_as_jax_would_listen_everywhere_and_send_peers_to_themselves(host: str, wanted: str) -> None:
    if host == "[::1]" and not is_own(Address(socket.AF_INET6, ("::1", 0))):
        pytest.skip("no IPv6 here")
    server = TransferServers(jax.devices(), host).start()
    assert server.address.startswith(wanted)
    assert server._server.address() == server.address


@pytest.mark.parametrize(
    ("host", "why"),
    [("203.0.113.7", "is no address of this machine"), (f"{'x' * 80}.example", ".")],
)
def test_what_is_no_address_of_this_machine_is_not_offered_and_the_flag_is_named(host: str, why: str) -> None:
    with pytest.raises(Unsupported, match=f"{why}.*; give --advertise-host an address of this machine"):
        TransferServers(jax.devices(), host)


def test_what_is_offered_is_pulled_once_and_withdrawn_memory_is_gone(
    ours: TransferServer, connection: TransferConnection
) -> None:
    sent = [array(3.0)]
    uuid = ours.offer(sent)
    assert np.array_equal(pull(connection, uuid), np.full(64, 3.0, np.float32))
    with pytest.raises(PieceError, match="pulled before"):  # the server would let it wait for ever
        pull(connection, uuid)
    ours.withdraw(sent)
    ours.withdraw(sent)
    assert sent[0].is_deleted()


def test_a_withdrawn_offer_fails_at_once_and_leaves_the_connection_alone(
    ours: TransferServer, connection: TransferConnection
) -> None:
    gone, kept = [array(1.0)], [array(2.0)]
    uuid, other = ours.offer(gone), ours.offer(kept)
    ours.withdraw(gone)
    began_s = time.monotonic()
    with pytest.raises(PieceError) as raised:
        pull(connection, uuid, within_s=60.0)
    assert raised.value.reason == "unknown_key"
    assert time.monotonic() - began_s < 20.0
    assert pull(connection, other)[0] == 2.0
    ours.withdraw(kept)


def test_an_offer_is_there_for_as_long_as_a_request_may_wait_for_its_turn() -> None:
    """A pull of an offer that has expired never ends. On a slow network a piece waits for minutes behind others."""
    assert ServerConfig().default_deadline_s + TransferConfig().lease_s < jax_server.OFFER_S


@pytest.mark.covers("X14")
def test_an_unknown_uuid_costs_its_deadline_and_the_next_pull_connects_anew(
    ours: TransferServer, connection: TransferConnection
) -> None:
    began_s = time.monotonic()
    with pytest.raises(PieceError) as raised:
        pull(connection, 12345, within_s=0.3)
    assert raised.value.reason == "timeout"
    assert 0.2 < time.monotonic() - began_s < 20.0
    kept = [array(4.0)]
    assert pull(connection, ours.offer(kept))[0] == 4.0
    ours.withdraw(kept)


def test_a_cancelled_pull_ends_soon(connection: TransferConnection) -> None:
    began_s = time.monotonic()
    with pytest.raises(PieceError, match="cancelled"):
        connection.end(connection.begin(54321, [spec()], began_s + 60.0), began_s + 60.0, lambda: True)
    assert time.monotonic() - began_s < 30.0


def test_several_pulls_are_on_their_way_and_one_that_is_cancelled_costs_the_others_nothing(
    ours: TransferServer, connection: TransferConnection
) -> None:
    ends_s = time.monotonic() + 60.0
    offered = [[array(float(value))] for value in range(3)]
    silent = connection.begin(98765, [spec()], ends_s)
    begun = [connection.begin(ours.offer(arrays), [spec()], ends_s) for arrays in offered]
    waiting = connection.begin(98766, [spec()], ends_s)
    seen: list[int] = []
    with pytest.raises(PieceError, match="cancelled"):
        connection.end(silent, ends_s, lambda: True, lambda: seen.append(1))
    assert seen, "nothing was done meanwhile"
    assert connection.is_open
    assert [np.asarray(connection.end(pull, ends_s)[0])[0] for pull in reversed(begun)] == [2.0, 1.0, 0.0]
    with pytest.raises(PieceError, match="cancelled"):
        connection.end(waiting, ends_s, lambda: True)
    assert not connection.is_open, "it stands in the way of what comes next"
    for arrays in offered:
        ours.withdraw(arrays)


def test_a_deadline_ends_what_is_on_its_way_over_the_same_connection(connection: TransferConnection) -> None:
    late = connection.begin(87654, [spec()], time.monotonic() + 60.0)
    with pytest.raises(PieceError, match="timeout"):
        pull(connection, 87655, within_s=jax_server._STILL_S + 0.5)
    with pytest.raises(PieceError) as raised:
        connection.end(late, time.monotonic() + 60.0)
    assert raised.value.reason == "connection"


def test_a_server_is_started_only_for_a_peer_that_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    """jaxlib never ends one whose connection was never made: threads and ports would be left for every pull from a dead P."""
    servers = TransferServers(jax.devices(), "127.0.0.1")
    servers._spare.clear()
    monkeypatch.setattr(jax_server, "TransferServer", None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        connection = servers.connect(f"127.0.0.1:{probe.getsockname()[1]}")
    began_s = time.monotonic()
    with pytest.raises(PieceError, match="refused"):
        pull(connection, 1, within_s=60.0)
    assert time.monotonic() - began_s < 20.0


def test_what_would_kill_or_hang_is_refused_before_the_server_sees_it(ours: TransferServer) -> None:
    deleted = array(1.0)
    deleted.delete()
    with pytest.raises(AssertionError, match="deleted"):
        ours.offer([deleted])
    with pytest.raises(AssertionError, match="no elements"):
        ours.offer([array(1.0, size=0)])
    with pytest.raises(AssertionError, match="several copies"):
        ours.offer([array(1.0, size=jax_server.COPY_BYTES // 4 + 1)])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    spread = jax.device_put(np.zeros(8, np.float32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    with pytest.raises(AssertionError, match="shard by shard"):
        ours.offer([spread])


def test_an_error_that_was_offered_reaches_the_puller_as_one(ours: TransferServer, connection: TransferConnection) -> None:
    bad = [error_array()]
    uuid = ours.offer(bad)
    wanted = jax.ShapeDtypeStruct(bad[0].shape, bad[0].dtype, sharding=ONE(jax.devices()[5]))
    ends_s = time.monotonic() + 30.0
    with pytest.raises(PieceError, match="injected"):
        connection.end(connection.begin(uuid, [wanted], ends_s), ends_s)


def listening_on() -> set[int]:
    """The ports on which this process listens as jax does."""
    ports = set()
    for descriptor in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # no socket, or closed by now
            one = socket.socket(fileno=descriptor)
            try:
                options = [one.getsockopt(socket.SOL_SOCKET, name) for name in (socket.SO_ACCEPTCONN, socket.SO_REUSEPORT)]
                ports |= {one.getsockname()[1]} if all(options) else set()
            finally:
                one.detach()
    return ports


def test_who_connects_and_says_nothing_holds_up_no_transfer(ours: TransferServer) -> None:
    """Such as a D that freezes while it connects, or somebody who looks which ports are open."""
    before = listening_on()
    other = TransferServers(jax.devices(), "127.0.0.1").start()
    ports = listening_on() - before
    assert len(ports) == 1 + jax_server.NUM_ADDRESSES
    silent = [socket.create_connection(("127.0.0.1", port), 60) for port in sorted(ports)]
    try:
        for _ in range(2):
            wanted = array(5.0)
            got = pull(transfer_servers()[1].connect(ours.address), ours.offer([wanted]), within_s=20.0)
            assert got.tolist() == [5.0] * 64
        assert all(one.recv(1) == b"" for one in silent if f":{one.getpeername()[1]}" not in other.address), "hung up on"
    finally:
        for one in silent:
            one.close()


def test_a_jax_without_a_transfer_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> None:
        raise ImportError("no such module")

    monkeypatch.setattr(jax_server.importlib, "import_module", missing)
    with pytest.raises(Unsupported, match="no such module"):
        TransferServers(jax.devices(), "127.0.0.1")


@pytest.mark.parametrize("num_left", [0, 8])
def test_where_too_few_threads_are_left_no_server_is_started_and_jax_does_not_end_the_process(
    num_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, start, left = transfer_servers()[0], threading.Thread.start, [num_left]
    servers.start()
    before = threading.enumerate()

    def start_or_not(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_or_not)
        with pytest.raises(Unsupported, match="can't start new thread"):
            servers.start()
    assert set(threading.enumerate()) <= set(before), "those of former tests may end meanwhile"
    servers.start()


def test_servers_and_threads_of_both_sides_end_though_nothing_moves_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What peers cost that were replaced is gone within seconds, not with the next request."""
    rig = Rig("jax").start()
    assert isinstance(rig.fetcher, LaneFetcher)
    assert isinstance(rig.publisher, LanePublisher)

    def receive(key: str) -> None:
        rig.peer = f"p-{key}"
        rig.arrived(rig.published(key, replace(piece(tokens(5)), receiver=f"d-{key}")))
        rig.publisher.discard(key)

    def idle_for(thread_s: float, server_s: float) -> None:
        """From now on."""
        monkeypatch.setattr(lanes, "IDLE_S", thread_s)
        monkeypatch.setattr(jax_receivers, "IDLE_S", server_s)
        for lane in (*rig.fetcher._lanes.values(), rig.publisher._lane):
            lane.submit(lambda: None)  # it waits anew

    receive("first")  # whatever begins with the first piece, and stays
    idle_for(1.0, 0.5)
    before = _settled()
    idle_for(600.0, 600.0)  # however long the next ones take
    for number in range(6):
        receive(f"k{number}")
    busy, of_servers = _num_held(), 6 * 3 * jax_server.NUM_ADDRESSES  # a side has two threads for each
    assert busy[0] >= before[0] + of_servers, f"threads and descriptors {busy}, before {before}: a server on either side"
    idle_for(1.0, 0.5)
    until(lambda: _num_held()[0] <= before[0] + 1 and _num_held()[1] <= before[1] + 2, "threads or descriptors are left")
    receive("again")
    rig.close()


def _num_held() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _settled() -> tuple[int, int]:
    """Once it has not changed for three seconds."""
    held, since_s, until_s = _num_held(), time.monotonic(), time.monotonic() + 40.0
    while time.monotonic() < min(since_s + 3.0, until_s):
        time.sleep(0.05)
        if _num_held() != held:
            held, since_s = _num_held(), time.monotonic()
    return held
