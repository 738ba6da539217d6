"""Plain sockets: pieces come whole, under whatever address, and nothing stays open."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress

import pytest

from jdisagg.transfer import tcp_source
from jdisagg.transfer.tcp_source import TcpSource
from jdisagg.transfer.tcp_store import TcpStore
from jdisagg.transfer.tcp_wire import Locator
from tests.unit.reading import read_whole
from tests.unit.transfer.tcp_ends import BIG, HOST, SECRET, ends, leaves, read


def test_pieces_of_any_size_arrive_over_one_connection(store: TcpStore, source: TcpSource) -> None:
    for size in (0, 1, 1000, tcp_source.PART_BYTES, tcp_source.PART_BYTES + 1, BIG):
        data = os.urandom(size)
        assert read(source, store.put(f"k{size}", data)) == data
    assert sum(thread.name.startswith("tcp-serve") for thread in threading.enumerate()) == 1


def test_reads_at_a_time_have_connections_of_their_own(store: TcpStore, source: TcpSource) -> None:
    locators = [store.put(name, name.encode() * BIG) for name in "abc"]
    rooms = [memoryview(bytearray(BIG)) for _ in locators]
    readers = [
        source.read_into("p", locator, room, time.monotonic() + 60) for locator, room in zip(locators, rooms, strict=True)
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


def test_a_piece_discarded_while_it_is_stored_is_freed(store: TcpStore) -> None:
    class Racing(dict[int, bytes | memoryview]):
        def __setitem__(self, number: int, data: bytes | memoryview) -> None:
            store.discard("k")  # the engine's, in between: it finds no key yet
            super().__setitem__(number, data)

    store._pieces = Racing()
    store.put("k", b"data")
    store.discard("k")  # the publisher's own
    assert not store._pieces


def test_a_piece_longer_than_its_room_is_refused_and_the_next_one_is_read(store: TcpStore, source: TcpSource) -> None:
    with pytest.raises(BufferError, match="has 64 bytes, not 63"):
        read_whole(source, "p", store.put("long", b"a" * 64), time.monotonic() + 60, room_bytes=63)
    assert read(source, store.put("k", b"data")) == b"data"


def test_a_reader_that_stops_early_gives_its_connection_up(store: TcpStore, source: TcpSource) -> None:
    reader = source.read_into("p", store.put("big", bytes(BIG)), memoryview(bytearray(BIG)), time.monotonic() + 60)
    next(reader)
    reader.close()
    assert ends("tcp-serve")
    assert read(source, store.put("k", b"data")) == b"data"


def test_connections_to_a_dropped_peer_are_closed_and_to_no_other(store: TcpStore, source: TcpSource) -> None:
    locator = store.put("k", b"data")
    for peer in ("a", "b"):
        assert read(source, locator, peer=peer) == b"data"
    source.drop("a")
    assert leaves("tcp-serve", 1)
    assert set(source._idle) == {"b"}
    assert read(source, locator, peer="b") == b"data"
    assert read(source, locator, peer="a") == b"data"


def test_nothing_is_left_open(source: TcpSource) -> None:
    def sockets() -> set[str]:
        """Each has a name that no other one ever has: those of former tests may end meanwhile."""
        found = set[str]()
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found.add(os.readlink(f"/proc/self/fd/{number}"))
        return {name for name in found if name.startswith("socket:")}

    before = sockets()
    for _ in range(3):
        store = TcpStore(HOST)
        mine = TcpSource()
        reader = mine.read_into("p", store.put("big", bytes(BIG)), memoryview(bytearray(BIG)), time.monotonic() + 60)
        next(reader)
        assert read(mine, store.put("k", b"data")) == b"data"
        store.close()
        with pytest.raises(ConnectionError):
            list(reader)
        mine.close()
        with pytest.raises(ConnectionError, match="closed"):
            read(mine, f"127.0.0.1:1 {SECRET} 1")
        assert ends("tcp-")
    assert sockets() <= before


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
