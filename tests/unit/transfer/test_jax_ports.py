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


def reason_of(peer: socket.socket, within_s: float = 30.0) -> str:
    """Why nothing is pulled from there."""
    host, port = peer.getsockname()
    with pytest.raises(PieceError) as raised:
        transfer_servers()[1].connect(f"{host}:{port}").begin(1, [], time.monotonic() + within_s)
    return raised.value.reason


def without_descriptors(*_: object, **__: object) -> socket.socket:
    raise OSError(errno.EMFILE, "Too many open files")
