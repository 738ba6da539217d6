"""Wrappers that break transfers on purpose, around any Publisher, Fetcher or ByteSource. For tests and fault drills.

Each takes a plan: one Fault (or None) per call, nothing after the plan is used up. Faults are injected where the real thing
would have them: wrong bytes below the checksum, failures as the events a backend posts, lost and late events above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from time import sleep

from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.transfer.base import (
    Fetcher,
    Piece,
    PieceArrived,
    PieceFailed,
    Post,
    Published,
    Publisher,
    PublishFailed,
    TransferEvent,
)
from jdisagg.transfer.host_backend import ByteSource


class Fault(Enum):
    """What goes wrong with one call."""

    DROP = "drop"  # the event is never posted
    DELAY = "delay"  # held until `let_go`
    LATE = "late"  # held until the hand-off was cancelled (fetch) or the piece discarded (publish)
    DUPLICATE = "duplicate"  # posted twice
    CORRUPT = "corrupt"  # one bit of the bytes flipped
    SCRAMBLE = "scramble"  # one bit in every byte of the second half flipped: no token would survive it
    TRUNCATE = "truncate"  # half of the bytes missing
    ERROR_ARRAY = "error_array"  # the device failed
    DISCONNECT = "disconnect"  # the connection broke half way


_SIGNS_FLIPPED = bytes(byte ^ 0x80 for byte in range(256))
_REASONS = {
    Fault.CORRUPT: "checksum",
    Fault.SCRAMBLE: "checksum",
    Fault.TRUNCATE: "truncated",
    Fault.ERROR_ARRAY: "device",
    Fault.DISCONNECT: "connection",
}


class _Valve:
    """Decides what becomes of the events of faulted calls; keys are piece keys."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._faults: dict[str, Fault] = {}
        self._held: list[tuple[str, Fault, TransferEvent]] = []

    def arm(self, key: str, fault: Fault | None) -> None:
        """The next event of `key` suffers `fault`."""
        if fault is not None:
            self._faults[key] = fault

    def pass_on(self, key: str, event: TransferEvent) -> None:
        """Post, hold, lose, or alter one event."""
        fault = self._faults.pop(key, None)
        if fault in (Fault.DELAY, Fault.LATE):
            self._held.append((key, fault, event))
        elif fault in _REASONS:
            self._post(_failure(event, _REASONS[fault]))
        elif fault is not Fault.DROP:
            self._post(event)
            if fault is Fault.DUPLICATE:
                self._post(event)

    def let_go(self, matches: Callable[[str, Fault, TransferEvent], bool]) -> None:
        """Post the held events for which `matches` holds."""
        held, self._held = self._held, []
        for key, fault, event in held:
            if matches(key, fault, event):
                self._post(event)
            else:
                self._held.append((key, fault, event))


def _failure(event: TransferEvent, reason: str) -> TransferEvent:
    match event:
        case PieceArrived(handoff=handoff, ready=ready):
            return PieceFailed(handoff=handoff, ready=ready, reason=reason, detail="injected")
        case Published(handoff=handoff, ready=ready):
            injected = f"{reason}: injected"
            return PublishFailed(handoff=handoff, key=ready.key, begin=ready.begin, end=ready.end, reason=injected)
        case _:
            return event


class FaultyFetcher:
    """A Fetcher with faults. `make` builds the real one around the Post it is given."""

    def __init__(self, make: Callable[[Post], Fetcher], post: Post, plan: Iterable[Fault | None]) -> None:
        self._valve = _Valve(post)
        self._plan = iter(plan)
        self._inner = make(self._on_event)
        self.name = self._inner.name

    def fetch(self, handoff: HandoffId, peer: str, ready: ChunkReady, deadline_s: float) -> None:
        """Fetch with the plan's next fault."""
        self._valve.arm(ready.key, next(self._plan, None))
        self._inner.fetch(handoff, peer, ready, deadline_s)

    def _on_event(self, event: TransferEvent) -> None:
        assert isinstance(event, PieceArrived | PieceFailed), f"a fetcher posted {type(event).__name__}"
        self._valve.pass_on(event.ready.key, event)

    def let_go(self) -> None:
        """Post what DELAY holds."""
        self._valve.let_go(lambda _key, fault, _event: fault is Fault.DELAY)

    def cancel(self, handoff: HandoffId) -> None:
        """Cancel; what LATE and DELAY hold of it comes now, too late."""
        self._inner.cancel(handoff)
        self._valve.let_go(lambda _key, _fault, event: event.handoff == handoff)

    def close(self) -> None:
        """Close the real one; held events are lost."""
        self._inner.close()


class FaultyPublisher:
    """A Publisher with faults."""

    def __init__(self, make: Callable[[Post], Publisher], post: Post, plan: Iterable[Fault | None]) -> None:
        self._valve = _Valve(post)
        self._plan = iter(plan)
        self._inner = make(self._on_event)
        self.name = self._inner.name

    def publish(self, handoff: HandoffId, key: str, piece: Piece) -> None:
        """Publish with the plan's next fault."""
        self._valve.arm(key, next(self._plan, None))
        self._inner.publish(handoff, key, piece)

    def _on_event(self, event: TransferEvent) -> None:
        match event:
            case Published(ready=ready):
                self._valve.pass_on(ready.key, event)
            case PublishFailed(key=key):
                self._valve.pass_on(key, event)
            case _:
                raise AssertionError(f"a publisher posted {type(event).__name__}")

    def let_go(self) -> None:
        """Post what DELAY holds."""
        self._valve.let_go(lambda _key, fault, _event: fault is Fault.DELAY)

    def discard(self, key: str) -> None:
        """Discard; what LATE and DELAY hold of it comes now, too late."""
        self._inner.discard(key)
        self._valve.let_go(lambda held, _fault, _event: held == key)

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes the real one holds."""
        return self._inner.num_buffered_bytes

    def close(self) -> None:
        """Close the real one; held events are lost."""
        self._inner.close()


class FaultyByteSource:
    """A ByteSource that spoils bytes on the way: CORRUPT, SCRAMBLE, TRUNCATE, DISCONNECT, DROP (no such key), DELAY."""

    def __init__(self, inner: ByteSource, plan: Iterable[Fault | None], *, delay_s: float = 0.05) -> None:
        self._inner = inner
        self._plan = iter(plan)
        self._delay_s = delay_s

    def read_into(self, peer: str, key: str, room: memoryview, deadline_s: float) -> Iterator[int]:
        """As the real one, with the plan's next fault."""
        fault = next(self._plan, None)
        if fault is Fault.DROP:
            raise KeyError(key)
        if fault is Fault.DELAY:
            sleep(self._delay_s)
        size = sum(self._inner.read_into(peer, key, room, deadline_s))
        if fault is Fault.CORRUPT:
            room[0] ^= 1
        if fault is Fault.SCRAMBLE:
            room[size // 2 : size] = bytes(room[size // 2 : size]).translate(_SIGNS_FLIPPED)
        yield size // 2 if fault in (Fault.TRUNCATE, Fault.DISCONNECT) else size
        if fault is Fault.DISCONNECT:
            raise ConnectionError(f"piece {key} of {peer}: the connection broke")
