"""Who may ask a publisher's plain socket: strangers are hung up on, soon and without many words, and keep nobody out."""

from __future__ import annotations

import resource
import socket
import threading
from dataclasses import replace

import pytest

from jdisagg.core.errors import NeverConnected
from jdisagg.transfer import tcp_store
from jdisagg.transfer.tcp_source import TcpSource
from jdisagg.transfer.tcp_store import TcpStore
from jdisagg.transfer.tcp_wire import REQUEST, Locator
from tests.unit.transfer.tcp_ends import HOST, ends, leaves, read, threads_called


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
    with socket.create_connection((HOST, locator.port), timeout=60) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[: REQUEST.size])
        assert stranger.recv(100) == b""
    assert read(source, str(locator)) == b"data"


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
    locator = Locator.parse(store.put("k", b"data"))
    for says in (b"", b"x"):
        with monkeypatch.context() as patch:
            patch.setattr(tcp_store, "REQUEST_TIMEOUT_S", 0.5)
            with socket.create_connection((HOST, locator.port), timeout=60) as stranger:
                stranger.sendall(says)
                assert stranger.recv(1) == b""
    assert read(source, str(locator)) == b"data"


def test_beyond_so_many_connections_p_hangs_up_at_once_and_other_backends_may_do(
    store: TcpStore, source: TcpSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp_store, "MAX_CONNECTIONS", 1)
    locator = store.put("k", b"data")
    assert read(source, locator, peer="first") == b"data"
    for _ in range(10):
        with pytest.raises(NeverConnected):  # and no piece is tried twice
            read(source, locator, peer="second")
    assert read(source, locator, peer="first") == b"data"
    assert [record.message for record in caplog.records] == [
        "tcp: all 1 connections are taken; hung up on 127.0.0.1, which goes on over another backend"
    ]


@pytest.mark.parametrize(
    ("limit", "most"),
    [(20, 1), (60, 3), (10_000, tcp_store.MAX_CONNECTIONS), (resource.RLIM_INFINITY, tcp_store.MAX_CONNECTIONS)],
)
def test_the_port_takes_no_more_than_a_small_share_of_the_descriptors(
    limit: int, most: int, store: TcpStore, source: TcpSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_store.resource, "getrlimit", lambda _: (limit, limit))
    assert tcp_store.most_connections() == most
    locator = store.put("k", b"data")
    for number in range(min(most, 5)):
        assert read(source, locator, peer=f"p{number}") == b"data"
    if most < 5:
        with pytest.raises(NeverConnected):
            read(source, locator, peer="one more")


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
        socket.create_connection((HOST, locator.port), timeout=60) as older,
        socket.create_connection((HOST, locator.port), timeout=60) as newer,
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
    caplog.set_level("DEBUG", tcp_store.log.name)
    for _ in range(3):
        socket.create_connection(store.address, timeout=5).close()
    assert ends("tcp-serve")
    assert [record.message for record in caplog.records if record.name == tcp_store.log.name] == []
