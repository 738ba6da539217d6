"""Fixtures of the transfer tests: the two ends of a TCP line, closed when the test is over; and patience with connections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jdisagg.api import channels
from jdisagg.transfer.tcp_source import TcpSource
from jdisagg.transfer.tcp_store import TcpStore
from tests.unit.transfer.tcp_ends import HOST


@pytest.fixture(autouse=True)
def _connections_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than their second, which a machine may stand still for."""
    options = dict(channels._CHANNEL_OPTIONS) | {"grpc.min_reconnect_backoff_ms": 60_000}
    monkeypatch.setattr(channels, "_CHANNEL_OPTIONS", tuple(options.items()))


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
