"""What a broken, silent or forgotten connection costs: time that is bounded, and no other read."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jdisagg.core import host_names
from jdisagg.core.errors import NeverConnected, Stalled
from jdisagg.transfer import tcp_source, tcp_store
from jdisagg.transfer.tcp_source import TcpSource
from jdisagg.transfer.tcp_store import TcpStore
from jdisagg.transfer.tcp_wire import REPLY, REQUEST, Locator
from tests.unit.transfer.tcp_ends import BIG, HOST, SECRET, ends, read


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


def test_nobody_there_is_said_at_once(store: TcpStore, source: TcpSource) -> None:
    locator = store.put("k", b"data")
    store.close()
    with pytest.raises(NeverConnected, match="refused"):
        read(source, locator)


def test_a_port_that_does_not_answer_takes_no_more_than_a_connection_may(
    source: TcpSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_source, "CONNECT_TIMEOUT_S", 0.2)
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        silent.listen(0)
        with socket.create_connection(silent.getsockname()):  # its queue is full
            locator = str(Locator(HOST, silent.getsockname()[1], b"s" * 16, 1))
            with pytest.raises(NeverConnected, match="timed out"):
                read(source, locator, within_s=30.0)
            with pytest.raises(TimeoutError):
                read(source, locator, within_s=0.1)


@pytest.mark.parametrize(("where", "number"), [("socket", errno.EMFILE), ("socket.connect", errno.EADDRNOTAVAIL)])
def test_a_machine_that_has_no_connection_left_says_nothing_of_its_peer(
    where: str, number: int, store: TcpStore, source: TcpSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    locator = store.put("k", b"data")

    def exhausted(*_: object) -> None:
        raise OSError(number, "none left")

    with monkeypatch.context() as patched:
        patched.setattr(f"socket.{where}", exhausted)
        with pytest.raises(ConnectionError, match="none left") as raised:
            read(source, locator)
    assert not isinstance(raised.value, NeverConnected)


@pytest.mark.covers("X14")
def test_a_silent_peer_costs_the_deadline_and_close_ends_the_wait(source: TcpSource) -> None:
    with socket.create_server((HOST, 0)) as silent:
        locator = str(Locator(HOST, silent.getsockname()[1], b"s" * 16, 1))
        began_s = time.monotonic()
        with pytest.raises(TimeoutError) as raised:
            read(source, locator, within_s=0.2)
        assert not isinstance(raised.value, Stalled)
        assert time.monotonic() - began_s < 15.0

    with socket.create_server((HOST, 0)) as silent:
        locator = str(Locator(HOST, silent.getsockname()[1], b"s" * 16, 1))
        asked = threading.Thread(target=keep_silent, args=(silent, b"", source.close))
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


def test_close_ends_a_read_that_waits_on_a_kept_connection(source: TcpSource) -> None:
    """It must not connect again to a peer that stands still, whose kernel accepts."""
    with socket.create_server((HOST, 0)) as silent:
        locator = Locator(HOST, silent.getsockname()[1], b"s" * 16, 1)
        serving = threading.Thread(target=keep_silent, args=(silent, REPLY.pack(4) + b"once", source.close))
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
    with socket.create_connection((HOST, locator.port), timeout=60) as stuck:
        stuck.sendall(REQUEST.pack(locator.secret, locator.number))
        assert read(source, store.put("k", b"data")) == b"data"
        source.close()  # its thread ends
        assert ends("tcp-serve")


def test_a_resolver_that_does_not_answer_costs_the_deadline_and_no_more(
    source: TcpSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, look_up = threading.Event(), socket.getaddrinfo

    def slow(host: str, *rest: Any, flags: int = 0, **named: Any) -> Any:
        if not flags & socket.AI_NUMERICHOST:
            answers.wait(60.0)
        return look_up(host, *rest, flags=flags, **named)

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", slow)
        began_s = time.monotonic()
        patched.setattr(host_names, "monotonic", lambda: began_s)  # it asks in time, even if this process stands still
        with pytest.raises(TimeoutError, match="resolver"):
            read(source, f"localhost:1 {SECRET} 1", within_s=0.2)
        assert time.monotonic() - began_s < 45.0
        answers.set()
        assert ends("resolve-")
