"""Wrappers that break transfers on purpose, around any Fetcher or ByteSource. For tests and fault drills.

Each takes a plan: one Fault (or None) per call, nothing after the plan is used up. Faults are injected where the real thing
would have them: wrong bytes below the checksum, failures as the events a backend posts, late events above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from time import sleep

from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.transfer.base import Fetcher, PieceArrived, PieceFailed, Post, TransferEvent
from jdisagg.transfer.host_backend import ByteSource


class Fault(Enum):
    """What goes wrong with one call, by the name that drills have for it."""

    MISSING = "missing"  # there is no such piece
    SLOW = "slow"  # the read begins late
    LATE = "late"  # the event is held until the hand-off was cancelled
    DUPLICATE = "duplicate"  # the event is posted twice
    CORRUPT = "corrupt"  # one bit of the bytes flipped
    SCRAMBLE = "scramble"  # one bit in every byte of the second half flipped: no token would survive it
    TRUNCATE = "truncate"  # half of the bytes missing
    ERROR_ARRAY = "error_array"  # the device failed
    DISCONNECT = "disconnect"  # the connection broke half way


DELAY_S = 0.05
_SIGNS_FLIPPED = bytes(byte ^ 0x80 for byte in range(256))


class FaultyFetcher:
    """A Fetcher with faults: LATE, DUPLICATE, ERROR_ARRAY. `make` builds the real one around the Post it is given."""

    def __init__(self, make: Callable[[Post], Fetcher], post: Post, plan: Iterable[Fault | None]) -> None:
        self._post = post
        self._plan = iter(plan)
        self._faults: dict[str, Fault] = {}  # of the next event, by the piece's key
        self._late: list[PieceArrived | PieceFailed] = []
        self._inner = make(self._pass_on)
        self.name = self._inner.name

    def fetch(self, handoff: HandoffId, peer: str, ready: ChunkReady, deadline_s: float) -> None:
        """Fetch with the plan's next fault."""
        if (fault := next(self._plan, None)) is not None:
            self._faults[ready.key] = fault
        self._inner.fetch(handoff, peer, ready, deadline_s)

    def _pass_on(self, event: TransferEvent) -> None:
        assert isinstance(event, PieceArrived | PieceFailed), f"a fetcher posted {type(event).__name__}"
        fault = self._faults.pop(event.ready.key, None)
        if fault is Fault.LATE:
            self._late.append(event)
            return
        if fault is Fault.ERROR_ARRAY and isinstance(event, PieceArrived):
            event = PieceFailed(handoff=event.handoff, ready=event.ready, reason="device", detail="injected")
        self._post(event)
        if fault is Fault.DUPLICATE:
            self._post(event)

    def cancel(self, handoff: HandoffId) -> None:
        """Cancel; what LATE holds of it comes now, too late."""
        self._inner.cancel(handoff)
        held, self._late = self._late, []
        for event in held:
            if event.handoff == handoff:
                self._post(event)
            else:
                self._late.append(event)

    def close(self) -> None:
        """Close the real one; held events are lost."""
        self._inner.close()


class FaultyByteSource:
    """A ByteSource that spoils bytes on the way: CORRUPT, SCRAMBLE, TRUNCATE, DISCONNECT, MISSING (no such key), SLOW."""

    def __init__(self, inner: ByteSource, plan: Iterable[Fault | None]) -> None:
        self._inner = inner
        self._plan = iter(plan)

    def read_into(self, peer: str, key: str, room: memoryview, deadline_s: float) -> Iterator[int]:
        """As the real one, with the plan's next fault."""
        fault = next(self._plan, None)
        if fault is Fault.MISSING:
            raise KeyError(key)
        if fault is Fault.SLOW:
            sleep(DELAY_S)
        size = sum(self._inner.read_into(peer, key, room, deadline_s))
        if fault is Fault.CORRUPT:
            room[0] ^= 1
        if fault is Fault.SCRAMBLE:
            room[size // 2 : size] = bytes(room[size // 2 : size]).translate(_SIGNS_FLIPPED)
        yield size // 2 if fault in (Fault.TRUNCATE, Fault.DISCONNECT) else size
        if fault is Fault.DISCONNECT:
            raise ConnectionError(f"piece {key} of {peer}: the connection broke")
