"""Plain sockets: who may ask, what a broken or silent connection costs, and that nothing stays open."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from jdisagg.core.errors import Stalled
from jdisagg.transfer import tcp_source, tcp_store
from jdisagg.transfer.tcp_source import TcpSource
from jdisagg.transfer.tcp_store import TcpStore
from jdisagg.transfer.tcp_wire import REPLY, REQUEST, Locator
from tests.unit.reading import read_whole

HOST = "127.0.0.1"
BIG = 16 * 2**20  # more than socket buffers hold
SECRET = "00" * 16


@pytest.fixture
def store() -> Iterator[TcpStore]:
    made = TcpStore(HOST)
    yield made
    made.close()


@pytest.fixture
def source() -> Iterator[TcpSource]:
    made = TcpSource()
    yield made
    made.close()


def read(source: TcpSource, locator: str, *, peer: str = "p", within_s: float = 30.0) -> bytes:
    return read_whole(source, peer, locator, time.monotonic() + within_s)


def ends(thread_name: str, within_s: float = 30.0) -> bool:
    """Whether no thread of the name is left in time."""
    return leaves(thread_name, 0, within_s)


def leaves(thread_name: str, num_threads: int, within_s: float = 30.0) -> bool:
    """Whether no more threads of the name than that are left in time."""
    until_s = time.monotonic() + within_s
    while len(threads_called(thread_name)) > num_threads:
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def threads_called(thread_name: str) -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(thread_name)}


def test_pieces_of_any_size_arrive_over_one_connection(store: TcpStore, source: TcpSource) -> None:
    for size in (0, 1, 1000, tcp_source.PART_BYTES, tcp_source.PART_BYTES + 1, BIG):
        data = os.urandom(size)
        assert read(source, store.put(f"k{size}", data)) == data
    assert sum(thread.name.startswith("tcp-serve") for thread in threading.enumerate()) == 1


def test_reads_at_a_time_have_connections_of_their_own(store: TcpStore, source: TcpSource) -> None:
    locators = [store.put(name, name.encode() * BIG) for name in "abc"]
    rooms = [memoryview(bytearray(BIG)) for _ in locators]
    readers = [
        source.read_into("p", locator, room, time.monotonic() + 5) for locator, room in zip(locators, rooms, strict=True)
    ]
    first = [next(reader) for reader in readers]
    assert [count + sum(reader) for count, reader in zip(first, readers, strict=True)] == [BIG] * 3
    assert [room == name * BIG for name, room in zip((b"a", b"b", b"c"), rooms, strict=True)] == [True] * 3


def test_a_discarded_or_unknown_piece_is_unknown_and_the_connection_goes_on(store: TcpStore, source: TcpSource) -> None:
    gone, kept = store.put("gone", b"g"), store.put("kept", b"k")
    store.discard("gone")
    store.discard("never there")
    with pytest.raises(KeyError, match="acknowledged"):
        read(source, gone)
    assert read(source, kept) == b"k"


@pytest.mark.parametrize(
    "text",
    ["", "key", "h:1 aa", "h:x aa 1", "h:1 zz 1", "h:1 aa -1", f"h:1 aa {2**64}", "h:1 aa 1 2", "h:1 aa 1", f"h:0 {SECRET} 1"],
)
def test_what_is_no_locator_is_unknown(source: TcpSource, text: str) -> None:
    with pytest.raises(KeyError, match="wanted"):
        read(source, text)


def test_who_does_not_know_the_secret_is_hung_up_on_and_that_is_said_once(
    store: TcpStore, source: TcpSource, caplog: pytest.LogCaptureFixture
) -> None:
    locator = Locator.parse(store.put("k", b"data"))
    with pytest.raises(ConnectionError, match="hung up"):
        read(source, str(replace(locator, secret=b"0" * 16)))
    for _ in range(5):
        with pytest.raises(ConnectionError, match="hung up"):
            read(source, str(replace(locator, secret=b"0" * 16)))
    assert caplog.text.count("asked for a piece of somebody else") == 1, "anybody can have it said as often as they like"
    with socket.create_connection((HOST, locator.port), timeout=5) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[: REQUEST.size])
        assert stranger.recv(100) == b""
    assert read(source, str(locator)) == b"data"


def test_a_connection_that_p_closed_meanwhile_is_replaced(
    store: TcpStore, source: TcpSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_store, "IDLE_TIMEOUT_S", 0.05)
    first, second = store.put("a", b"a"), store.put("b", b"b")
    assert read(source, first) == b"a"
    assert ends("tcp-serve")
    assert read(source, second) == b"b"


def test_a_peer_that_was_started_again_under_its_name_is_found_at_its_new_port(source: TcpSource) -> None:
    for data in (b"before", b"after"):
        store = TcpStore(HOST)
        assert read(source, store.put("k", data)) == data
        store.close()


def test_nobody_there_is_a_broken_connection_at_once(store: TcpStore, source: TcpSource) -> None:
    locator = store.put("k", b"data")
    store.close()
    with pytest.raises(ConnectionError, match="refused"):
        read(source, locator)


@pytest.mark.covers("X14")
def test_a_silent_peer_costs_the_deadline_and_drop_ends_the_wait(source: TcpSource) -> None:
    with socket.create_server((HOST, 0)) as silent:
        locator = str(Locator(HOST, silent.getsockname()[1], b"s" * 16, 1))
        began_s = time.monotonic()
        with pytest.raises(TimeoutError) as raised:
            read(source, locator, within_s=0.2)
        assert not isinstance(raised.value, Stalled)
        assert time.monotonic() - began_s < 15.0

    with socket.create_server((HOST, 0)) as silent:
        locator = str(Locator(HOST, silent.getsockname()[1], b"s" * 16, 1))
        asked = threading.Thread(target=keep_silent, args=(silent, b"", lambda: source.drop("p")))
        asked.start()
        began_s = time.monotonic()
        with pytest.raises(ConnectionError):
            read(source, locator, within_s=60.0)
        assert time.monotonic() - began_s < 30.0
        asked.join()


def keep_silent(server: socket.socket, first: bytes, asked: Callable[[], object]) -> None:
    """Answer one request with `first`, if that is anything; to every other call `asked`, until the other side hangs up."""
    connection, _ = server.accept()
    with connection:
        if first:
            connection.recv(REQUEST.size)
            connection.sendall(first)
        while connection.recv(REQUEST.size):
            asked()


@pytest.mark.parametrize("sent", [b"", REPLY.pack(100), REPLY.pack(100) + b"half"])
def test_a_peer_from_which_nothing_more_comes_is_not_waited_for_until_the_deadline(
    source: TcpSource, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(tcp_source, "STALL_TIMEOUT_S", 0.2)

    def stall(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(REQUEST.size)
            connection.sendall(sent)
            while connection.recv(100):
                pass

    with socket.create_server((HOST, 0)) as server:
        stalling = threading.Thread(target=stall, args=(server,))
        stalling.start()
        began_s = time.monotonic()
        with pytest.raises(Stalled):
            read(source, str(Locator(HOST, server.getsockname()[1], b"s" * 16, 1)), within_s=60.0)
        assert time.monotonic() - began_s < 30.0
        stalling.join()


def test_a_kept_connection_on_which_nothing_comes_is_replaced(
    store: TcpStore, source: TcpSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands between may have forgotten it."""
    monkeypatch.setattr(tcp_source, "STALL_TIMEOUT_S", 1.0)
    first, second = store.put("a", b"a"), store.put("b", b"b")
    assert read(source, first) == b"a"
    (kept,) = source._idle["p"]
    kept.socket.close()
    pairs = [socket.socketpair() for _ in range(4)]
    source._idle["p"] = [replace(kept, socket=forgotten) for forgotten, _ in pairs]
    assert read(source, second) == b"b"
    said = [other_end.recv(100) for _, other_end in pairs]
    assert [bool(asked) for asked in said] == [False, False, False, True], "one was asked, all were hung up on"
    for _, other_end in pairs:
        assert other_end.recv(100) == b""
        other_end.close()


def test_drop_ends_a_read_that_waits_on_a_kept_connection(source: TcpSource) -> None:
    """It must not connect again to a peer that stands still, whose kernel accepts."""
    with socket.create_server((HOST, 0)) as silent:
        locator = Locator(HOST, silent.getsockname()[1], b"s" * 16, 1)
        serving = threading.Thread(target=keep_silent, args=(silent, REPLY.pack(4) + b"once", lambda: source.drop("p")))
        serving.start()
        assert read(source, str(locator)) == b"once"
        began_s = time.monotonic()
        with pytest.raises(ConnectionError):
            read(source, str(locator), within_s=60.0)
        assert time.monotonic() - began_s < 30.0
        serving.join()


@pytest.mark.parametrize("num_bytes", [-2, -(2**63)])
def test_a_length_that_means_nothing_is_a_broken_connection(source: TcpSource, num_bytes: int) -> None:
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(REQUEST.size)
            connection.sendall(REPLY.pack(num_bytes) + b"more")

    with socket.create_server((HOST, 0)) as server:
        answering = threading.Thread(target=answer, args=(server,))
        answering.start()
        with pytest.raises(ConnectionError, match="another protocol"):
            read(source, str(Locator(HOST, server.getsockname()[1], b"s" * 16, 1)))
        answering.join()


@pytest.mark.parametrize("host", ["..", "x" * 70, "no-such-host.invalid"])
def test_a_host_that_is_none_is_a_broken_connection(source: TcpSource, host: str) -> None:
    with pytest.raises(ConnectionError):
        read(source, f"{host}:1 {SECRET} 1")


@pytest.mark.parametrize(("bind", "name"), [("[::1]", ""), ("0.0.0.0", "localhost"), ("::1", "[::1]")])
def test_pieces_are_served_on_ipv6_and_under_another_name(source: TcpSource, bind: str, name: str) -> None:
    store = TcpStore(bind, name)
    try:
        assert read(source, store.put("k", b"data")) == b"data"
    finally:
        store.close()


def refuse(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_thread_that_cannot_start_costs_its_connection_alone_and_is_told_once(
    store: TcpStore, source: TcpSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    locator = store.put("k", b"data")
    with monkeypatch.context() as patch:
        patch.setattr(tcp_store.threading.Thread, "start", refuse)
        for _ in range(3):
            with pytest.raises(ConnectionError):
                read(source, locator)
    assert read(source, locator) == b"data"
    assert [record.message for record in caplog.records] == ["tcp: can't start new thread; hung up on 127.0.0.1"]


def test_strangers_who_say_nothing_are_soon_hung_up_on(
    store: TcpStore, source: TcpSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_store, "REQUEST_TIMEOUT_S", 0.5)
    locator = Locator.parse(store.put("k", b"data"))
    for says in (b"", b"x"):
        with socket.create_connection((HOST, locator.port), timeout=5) as stranger:
            stranger.sendall(says)
            assert stranger.recv(1) == b""
    assert read(source, str(locator)) == b"data"


def test_a_piece_discarded_while_it_is_stored_is_freed(store: TcpStore) -> None:
    class Racing(dict[int, bytes | memoryview]):
        def __setitem__(self, number: int, data: bytes | memoryview) -> None:
            store.discard("k")  # the engine's, in between: it finds no key yet
            super().__setitem__(number, data)

    store._pieces = Racing()
    store.put("k", b"data")
    store.discard("k")  # the publisher's own
    assert not store._pieces


def test_a_peer_that_dies_in_the_middle_is_a_broken_connection(source: TcpSource) -> None:
    def die(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(REQUEST.size)
            connection.sendall(REPLY.pack(100) + b"half")

    with socket.create_server((HOST, 0)) as server:
        dying = threading.Thread(target=die, args=(server,))
        dying.start()
        with pytest.raises(ConnectionError, match="96 bytes before the end"):
            read(source, str(Locator(HOST, server.getsockname()[1], b"s" * 16, 1)))
        dying.join()


def test_a_reader_that_stands_still_is_hung_up_on_and_holds_up_nobody(
    store: TcpStore, source: TcpSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_store, "STALL_TIMEOUT_S", 0.2)
    locator = Locator.parse(store.put("big", bytes(BIG)))
    with socket.create_connection((HOST, locator.port), timeout=5) as stuck:
        stuck.sendall(REQUEST.pack(locator.secret, locator.number))
        assert read(source, store.put("k", b"data")) == b"data"
        source.drop("p")  # its thread ends
        assert ends("tcp-serve")


def test_a_piece_longer_than_its_room_is_refused_and_the_next_one_is_read(store: TcpStore, source: TcpSource) -> None:
    with pytest.raises(BufferError, match="has 64 bytes, not 63"):
        read_whole(source, "p", store.put("long", b"a" * 64), time.monotonic() + 5, room_bytes=63)
    assert read(source, store.put("k", b"data")) == b"data"


def test_a_reader_that_stops_early_gives_its_connection_up(store: TcpStore, source: TcpSource) -> None:
    reader = source.read_into("p", store.put("big", bytes(BIG)), memoryview(bytearray(BIG)), time.monotonic() + 5)
    next(reader)
    reader.close()
    assert ends("tcp-serve")
    assert read(source, store.put("k", b"data")) == b"data"


def test_beyond_so_many_connections_p_hangs_up_at_once(
    store: TcpStore, source: TcpSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_store, "MAX_CONNECTIONS", 1)
    locator = store.put("k", b"data")
    assert read(source, locator, peer="first") == b"data"
    with pytest.raises(ConnectionError):
        read(source, locator, peer="second")
    assert read(source, locator, peer="first") == b"data"


def is_open(connection: socket.socket, within_s: float = 0.3) -> bool:
    """Whether P holds on to it for the time."""
    connection.settimeout(within_s)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True


def test_on_a_full_port_the_oldest_stranger_makes_room_and_who_showed_the_secret_never(
    store: TcpStore, source: TcpSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_store, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(tcp_store, "REQUEST_TIMEOUT_S", 30.0)
    locator = Locator.parse(store.put("k", b"data"))
    assert read(source, str(locator), peer="first") == b"data"
    with (
        socket.create_connection((HOST, locator.port), timeout=5) as older,
        socket.create_connection((HOST, locator.port), timeout=5) as newer,
    ):
        newer.sendall(b"x")  # without a word, or in the middle of the secret
        assert read(source, str(locator), peer="second") == b"data"
        assert not is_open(older, within_s=30.0)
        assert is_open(newer)
        assert read(source, str(locator), peer="third") == b"data"
        assert not is_open(newer, within_s=30.0)
    with pytest.raises(ConnectionError):
        read(source, str(locator), peer="fourth")
    assert leaves("tcp-serve", 3)
    kept = threads_called("tcp-serve")
    assert [read(source, str(locator), peer=peer) for peer in ("first", "second", "third")] == [b"data"] * 3
    assert threads_called("tcp-serve") == kept, "their connections were there all the time"


def test_a_connection_that_asks_for_nothing_leaves_no_word_in_the_log(
    store: TcpStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    for _ in range(3):
        socket.create_connection(store.address, timeout=5).close()
    assert ends("tcp-serve")
    assert caplog.messages == []


def test_a_resolver_that_does_not_answer_costs_the_deadline_and_no_more(
    source: TcpSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, look_up = threading.Event(), socket.getaddrinfo

    def slow(host: str, *rest: Any, flags: int = 0, **named: Any) -> Any:
        if not flags & socket.AI_NUMERICHOST:
            answers.wait(20.0)
        return look_up(host, *rest, flags=flags, **named)

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", slow)
        began_s = time.monotonic()
        with pytest.raises(TimeoutError, match="resolver"):
            read(source, f"localhost:1 {SECRET} 1", within_s=0.2)
        assert time.monotonic() - began_s < 15.0
        answers.set()
        assert ends("resolve-")


def test_unused_connections_are_closed_when_another_is_made(
    store: TcpStore, source: TcpSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_source, "IDLE_TIMEOUT_S", 0.0)
    locator = store.put("k", b"data")
    for peer in ("a", "b", "c"):
        assert read(source, locator, peer=peer) == b"data"
    assert leaves("tcp-serve", 1)
    assert sum(thread.name.startswith("tcp-serve") for thread in threading.enumerate()) == 1


def test_nothing_is_left_open(source: TcpSource) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(3):
        store = TcpStore(HOST)
        mine = TcpSource()
        reader = mine.read_into("p", store.put("big", bytes(BIG)), memoryview(bytearray(BIG)), time.monotonic() + 5)
        next(reader)
        assert read(mine, store.put("k", b"data")) == b"data"
        store.close()
        with pytest.raises(ConnectionError):
            list(reader)
        mine.close()
        with pytest.raises(ConnectionError, match="closed"):
            read(mine, f"127.0.0.1:1 {SECRET} 1")
        assert ends("tcp-")
    assert descriptors() == before


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no socket serves IPv4 and IPv6 here")
def test_every_address_is_both_kinds_of_address(source: TcpSource) -> None:
    store = TcpStore("::", HOST)
    try:
        assert read(source, store.put("k", b"data")) == b"data"
    finally:
        store.close()


def test_an_address_of_a_family_that_is_not_there_is_passed_over(
    source: TcpSource, store: TcpStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    locator = Locator.parse(store.put("k", b"data"))
    found = socket.getaddrinfo(HOST, locator.port, type=socket.SOCK_STREAM)
    missing = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", locator.port, 0, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [missing, *found])
    make = socket.socket

    def without_ipv6(family: int = -1, *rest: int, **named: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return make(family, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(tcp_source.socket, "socket", without_ipv6)
        assert read(source, str(locator)) == b"data"
