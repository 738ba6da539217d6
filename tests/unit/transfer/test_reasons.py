"""Why a read failed, as the hand-off is told: what is slow may get more time, what brings nothing may not."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from jdisagg.core.errors import NeverConnected, Stalled
from jdisagg.transfer import host_backend
from jdisagg.transfer.base import PieceFailed
from jdisagg.transfer.host_backend import STALL_S, host_fetcher
from tests.unit.transfer.rig import TARGET, Rig, piece, tokens


class Failing:
    """A ByteSource whose reads fail after `num_bytes`, and `seconds` of a clock that it puts in the place of ours."""

    def __init__(self, error: Exception, num_bytes: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self._error = error
        self._num_bytes = num_bytes
        self._seconds = seconds
        self._now_s = 100.0
        monkeypatch.setattr(host_backend, "monotonic", lambda: self._now_s)

    def read_into(self, peer: str, key: str, room: memoryview, deadline_s: float) -> Iterator[int]:
        if self._num_bytes:
            yield self._num_bytes
        self._now_s += self._seconds
        raise self._error


@pytest.mark.parametrize(
    ("error", "num_bytes", "seconds", "reason"),
    [
        (Stalled("nothing came"), 0, 0.0, "stalled"),
        (Stalled("nothing more came"), 8, 0.0, "stalled"),
        (TimeoutError("the deadline"), 8, STALL_S, "slow"),
        (TimeoutError("the deadline"), 0, STALL_S, "stalled"),
        (TimeoutError("the deadline"), 0, STALL_S / 2, "timeout"),  # its turn came late
        (ConnectionError("reset"), 8, 0.0, "connection"),
        (NeverConnected("refused"), 0, 0.0, "unreachable"),
        (OSError(errno.EMFILE, "Too many open files"), 0, 0.0, "connection"),
    ],
)
def test_a_failed_read_says_whether_anything_came(
    error: Exception, num_bytes: int, seconds: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig("grpc").start()
    try:
        ready = rig.published("k", piece(tokens(5)))
        rig.fetcher.close()
        rig.fetcher = host_fetcher("grpc", Failing(error, num_bytes, seconds, monkeypatch), TARGET, rig.events.put)
        rig.fetch(ready)
        event = rig.event()
        assert isinstance(event, PieceFailed)
        assert event.reason == reason
    finally:
        rig.close()
