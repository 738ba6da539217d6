"""Fixtures of the transfer tests: the two ends of a TCP line, closed when the test is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jdisagg.transfer.tcp_source import TcpSource
from jdisagg.transfer.tcp_store import TcpStore
from tests.unit.transfer.tcp_ends import HOST


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
