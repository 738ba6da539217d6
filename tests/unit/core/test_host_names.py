"""Hosts to addresses: numeric ones at once, names within the caller's time and with one thread each."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from jdisagg.core import host_names
from jdisagg.core.host_names import Address, Names, is_own, own_address_of
from tests.unit.waiting import until


class Resolver:
    """In the place of getaddrinfo: holds names until `answers`; knows "there" alone."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers = threading.Event()

    def __call__(self, host: str, _port: None, *, type: int, flags: int) -> list[tuple[Any, ...]]:
        if flags & socket.AI_NUMERICHOST:
            if host != "127.0.0.1":
                raise socket.gaierror("no number")
        else:
            self.asked.append(host)
            assert self.answers.wait(60.0)
            if host != "there":
                raise socket.gaierror(f"nobody knows {host}")
        return [(socket.AF_INET, type, 6, "", ("127.0.0.1", 0)), (socket.AF_INET6, type, 6, "", ("::1", 0, 0, 3))]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.answers.set()
    until(lambda: not resolving())


def resolving() -> int:
    return sum(thread.name.startswith("resolve-") for thread in threading.enumerate())


def addresses(known: Names, host: str, within_s: float = 30.0) -> list[tuple[Any, ...]]:
    return [(address.at(80).family, address.at(80).sockaddr) for address in known.addresses(host, time.monotonic() + within_s)]


THERE = [(socket.AF_INET, ("127.0.0.1", 80)), (socket.AF_INET6, ("::1", 80, 0, 3))]


def test_a_number_needs_no_resolver_and_no_thread(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_names.threading, "Thread", None)
    assert addresses(Names(), "127.0.0.1") == THERE
    assert resolver.asked == []


def test_a_silent_resolver_costs_the_deadline_and_one_thread_for_all_who_ask(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_names, "monotonic", lambda: 100.0)  # however long this process stands still before it asks
    known = Names()
    for _ in range(3):
        with pytest.raises(TimeoutError, match="there: no answer"):
            known.addresses("there", 100.05)
    until(lambda: resolver.asked)
    assert (resolver.asked, resolving()) == (["there"], 1)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "resolve-there"), "it holds up no end"
    resolver.answers.set()
    assert addresses(known, "there") == THERE
    assert resolver.asked == ["there"]


@pytest.mark.parametrize(("remember_s", "times_asked"), [(10.0, 1), (0.0, 2)])
def test_an_answer_is_remembered_for_a_while(resolver: Resolver, remember_s: float, times_asked: int) -> None:
    resolver.answers.set()
    known = Names(remember_s)
    for _ in range(2):
        assert addresses(known, "there") == THERE
    assert resolver.asked == ["there"] * times_asked


def test_a_name_that_nobody_knows_is_a_broken_connection_and_asked_for_again(resolver: Resolver) -> None:
    resolver.answers.set()
    known = Names()
    for _ in range(2):
        with pytest.raises(ConnectionError, match="nobody knows gone"):
            addresses(known, "gone")
    assert resolver.asked == ["gone", "gone"]


def test_a_thread_that_cannot_start_is_a_broken_connection_this_once(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver.answers.set()
    known = Names()
    with monkeypatch.context() as patched:
        patched.setattr(host_names.threading.Thread, "start", refuse)
        with pytest.raises(ConnectionError, match="new thread"):
            addresses(known, "there")
    assert addresses(known, "there") == THERE


class Host:
    """In the place of getaddrinfo: names of this machine and of others."""

    ADDRESSES: ClassVar = {
        "worker-0": ["203.0.113.7", "127.0.1.1", "127.0.0.2"],
        "debian": ["127.0.1.1"],
        "six": ["::1"],
        "elsewhere": ["203.0.113.7"],
        "localhost": ["127.0.0.1"],
    }

    def __init__(self, own: set[str]) -> None:
        self.own = own

    def __call__(self, host: str, _port: None, *, type: int, flags: int) -> list[tuple[Any, ...]]:
        numeric = host[0].isdigit() or ":" in host
        if flags & socket.AI_NUMERICHOST and not numeric:
            raise socket.gaierror("no number")
        found = [host] if numeric else self.ADDRESSES[host]
        return [(socket.AF_INET6 if ":" in one else socket.AF_INET, type, 17, "", (one, 0)) for one in found]


@pytest.mark.parametrize(
    ("host", "own", "wanted"),
    [
        ("127.0.0.1", {"127.0.0.1"}, "127.0.0.1"),
        ("::1", {"::1"}, "::1"),
        ("localhost", {"127.0.0.1"}, "127.0.0.1"),
        ("203.0.113.7", {"203.0.113.7"}, "203.0.113.7"),
        ("worker-0", {"203.0.113.7", "127.0.1.1"}, "203.0.113.7"),
        ("worker-0", {"127.0.1.1"}, "worker-0 is 127.0.1.1 here, which nobody else reaches"),
        ("debian", {"127.0.1.1"}, "debian is 127.0.1.1 here, which nobody else reaches"),
        ("six", {"::1"}, "six is ::1 here, which nobody else reaches"),
        ("elsewhere", {"127.0.0.1"}, "elsewhere is no address of this machine"),
        ("203.0.113.7", {"127.0.0.1"}, "203.0.113.7 is no address of this machine"),
    ],
)
def test_the_own_address_of_a_name_is_one_that_is_here_and_others_reach(
    host: str, own: set[str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Host(own))
    monkeypatch.setattr(host_names, "is_own", lambda address: address.sockaddr[0] in own)
    if " " in wanted:
        with pytest.raises(OSError, match=f"^{wanted}$"):
            own_address_of(host)
    else:
        assert own_address_of(host) == wanted


def test_whether_an_address_is_of_this_machine() -> None:
    assert is_own(Address(socket.AF_INET, ("127.0.0.1", 80)))
    assert not is_own(Address(socket.AF_INET, ("203.0.113.7", 80)))
    assert not is_own(Address(socket.AF_INET6, ("2001:db8::7", 80, 0, 0)))
