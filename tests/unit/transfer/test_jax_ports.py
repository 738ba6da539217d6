"""A transfer server behind a port that is shut: the hand-off is told so, and not that a connection broke."""

from __future__ import annotations

import errno
import socket
import time

import pytest

from jdisagg.transfer import jax_server
from jdisagg.transfer.target import PieceError
from tests.unit.transfer.rig import transfer_servers


def test_a_port_that_nobody_listens_at_or_that_never_answers_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_server, "CONNECT_TIMEOUT_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert reason_of(taken) == "unreachable"
        taken.listen(0)
        with socket.create_connection(taken.getsockname()):  # more are left without an answer, as behind a firewall
            assert reason_of(taken) == "unreachable"
            assert reason_of(taken, within_s=0.05) == "timeout", "the request had too little time to tell"
            monkeypatch.setattr(socket, "create_connection", without_descriptors)
            assert reason_of(taken) == "connection"


def test_those_that_waited_for_a_try_that_failed_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests that begin in the same moment, one behind the other: the last one is not to wait for as many tries."""
    tries, attempt = list[str](), jax_server._try

    def noted(address: str, deadline_s: float) -> None:
        tries.append(address)
        attempt(address, deadline_s)

    monkeypatch.setattr(jax_server, "_try", noted)
    monkeypatch.setattr(jax_server, "CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(jax_server, "SHUT_S", 60.0)  # however long this process stands still between two of them
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        with socket.create_connection(silent.getsockname()):
            connection = transfer_servers()[1].connect(address_of(silent))
            for uuid in range(20):
                with pytest.raises(PieceError, match=r"has not answered for 0\.5 s") as raised:
                    connection.begin(uuid, [], time.monotonic() + 30.0)
                assert raised.value.reason == "unreachable"
    assert len(tries) == 1


def test_an_offer_that_was_not_reached_was_not_pulled() -> None:
    """It is asked for again, when the port is open."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        connection = transfer_servers()[1].connect(address_of(taken))
        for _ in range(2):
            with pytest.raises(PieceError) as raised:
                connection.begin(1, [], time.monotonic() + 30.0)
            assert raised.value.reason == "unreachable"


def reason_of(peer: socket.socket, within_s: float = 30.0) -> str:
    """Why nothing is pulled from there."""
    with pytest.raises(PieceError) as raised:
        transfer_servers()[1].connect(address_of(peer)).begin(1, [], time.monotonic() + within_s)
    return raised.value.reason


def address_of(peer: socket.socket) -> str:
    host, port = peer.getsockname()
    return f"{host}:{port}"


def without_descriptors(*_: object, **__: object) -> socket.socket:
    raise OSError(errno.EMFILE, "Too many open files")
