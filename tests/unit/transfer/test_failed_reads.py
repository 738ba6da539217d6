"""A read that failed lets go of the memory it should have filled at once, not when the collector comes by."""

from __future__ import annotations

import gc
import socket
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from jdisagg.api.peer.byte_source import GrpcByteSource
from jdisagg.transfer.host_backend import ByteSource
from jdisagg.transfer.tcp_source import TcpSource
from jdisagg.transfer.tcp_wire import SECRET_BYTES, Locator
from tests.unit.transfer.rig import Rig

HOST = "127.0.0.1"


@pytest.fixture
def closed_port() -> Iterator[int]:
    """At which nobody listens, nor will: it is taken."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        yield int(taken.getsockname()[1])


@pytest.fixture
def silent_port() -> Iterator[int]:
    with socket.create_server((HOST, 0)) as listener:
        yield int(listener.getsockname()[1])


def is_free_after(source: ByteSource, peer: str, key: str, error: type[Exception], within_s: float = 60.0) -> bool:
    """Whether a failed read holds nothing of its room, with no collector to help."""
    room = np.zeros(2**20, np.uint8)
    gone = weakref.ref(room)
    gc.collect()
    gc.disable()
    try:
        try:
            for _ in source.read_into(peer, key, room.data, time.monotonic() + within_s):
                pass
        except error:
            pass
        else:
            raise AssertionError("it did not fail")
        del room
        return gone() is None
    finally:
        gc.enable()


def test_grpc_reads(silent_port: int, closed_port: int) -> None:
    rig = Rig("grpc-loopback").start()
    source = GrpcByteSource()
    try:
        assert is_free_after(source, rig.peer, "unknown", KeyError)
        assert is_free_after(source, f"{HOST}:{closed_port}", "k", ConnectionError)
        assert is_free_after(source, f"{HOST}:{silent_port}", "k", TimeoutError, within_s=0.5)
    finally:
        source.close()
        rig.close()
    with pytest.raises(ConnectionError, match="closed"):
        next(iter(source.read_into(rig.peer, "k", memoryview(bytearray(1)), time.monotonic() + 1)))


def test_tcp_reads(silent_port: int, closed_port: int) -> None:
    source = TcpSource()
    try:
        for port, error, within_s in ((closed_port, ConnectionError, 60.0), (silent_port, TimeoutError, 0.5)):
            assert is_free_after(source, "p", str(Locator(HOST, port, bytes(SECRET_BYTES), 1)), error, within_s)
    finally:
        source.close()
