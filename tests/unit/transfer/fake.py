"""Backend "fake": pieces as bytes in a dict, moved one step at a time by whoever holds the network. No threads.

    network = FakeNetwork()
    publisher, fetcher = FakePublisher(network, post), FakeFetcher(network, target, post)
    publisher.publish(...); network.step()   # Published
    fetcher.fetch(...);     network.step()   # PieceArrived

Between steps a test may spoil what is stored: `network.pieces[key] = ...`, `del network.pieces[key]`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.transfer.base import Piece, PieceArrived, PieceFailed, Post, Published, PublishFailed
from jdisagg.transfer.target import PieceError, PieceTarget, announce, checksum_of, num_bytes_of, pack


class FakeNetwork:
    """Stored bytes and pending steps of both sides."""

    def __init__(self) -> None:
        self.pieces: dict[str, bytes] = {}
        self._steps: deque[Callable[[], None]] = deque()

    def later(self, step: Callable[[], None]) -> None:
        """Append a step."""
        self._steps.append(step)

    def step(self) -> bool:
        """Run the oldest step; False when there is none."""
        if not self._steps:
            return False
        self._steps.popleft()()
        return True

    def run(self) -> None:
        """Run steps until there are none."""
        while self.step():
            pass


class FakePublisher:
    """P's half."""

    name = "fake"

    def __init__(self, network: FakeNetwork, post: Post) -> None:
        self._network = network
        self._post = post
        self._sizes: dict[str, int] = {}

    def publish(self, handoff: HandoffId, key: str, piece: Piece) -> None:
        """Fetchable after a step."""
        assert piece.begin < piece.end, f"piece [{piece.begin}, {piece.end}) of {handoff} is empty"
        self._sizes[key] = num_bytes_of(piece)
        self._network.later(lambda: self._store(handoff, key, piece))

    def _store(self, handoff: HandoffId, key: str, piece: Piece) -> None:
        if key not in self._sizes:
            return
        try:
            data = bytes(pack(piece))
        except RuntimeError as error:
            self.discard(key)
            reason = f"device: {error}"
            self._post(PublishFailed(handoff=handoff, key=key, begin=piece.begin, end=piece.end, reason=reason))
            return
        self._network.pieces[key] = data
        self._post(Published(handoff=handoff, ready=announce(key, piece, checksum_of(data), backend=self.name)))

    def discard(self, key: str) -> None:
        """Free the bytes."""
        self._sizes.pop(key, None)
        self._network.pieces.pop(key, None)

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes held."""
        return sum(self._sizes.values())

    def close(self) -> None:
        """Free everything."""
        for key in list(self._sizes):
            self.discard(key)


class FakeFetcher:
    """D's half. Every step of a fetch looks at the bytes as they are then."""

    name = "fake"

    def __init__(self, network: FakeNetwork, target: PieceTarget, post: Post) -> None:
        self._network = network
        self._target = target
        self._post = post
        self._pending: set[tuple[HandoffId, str]] = set()

    def fetch(self, handoff: HandoffId, peer: str, ready: ChunkReady, deadline_s: float) -> None:
        """Answers in a later step, whatever the deadline: time is the test's."""
        self._pending.add((handoff, ready.key))
        self._network.later(lambda: self._deliver(handoff, ready))

    def _deliver(self, handoff: HandoffId, ready: ChunkReady) -> None:
        if (handoff, ready.key) not in self._pending:
            return
        self._pending.remove((handoff, ready.key))
        try:
            self._target.check(ready)
            if ready.key not in self._network.pieces:
                raise PieceError("unknown_key", f"no piece {ready.key!r}")
            piece = self._target.arrived(ready, self._target.unpack(self._network.pieces[ready.key], ready))
        except PieceError as error:
            self._post(PieceFailed(handoff=handoff, ready=ready, reason=error.reason, detail=error.detail))
            return
        self._post(PieceArrived(handoff=handoff, ready=ready, piece=piece, seconds=0.0))

    def cancel(self, handoff: HandoffId) -> None:
        """Forget the fetches of `handoff`."""
        self._pending = {entry for entry in self._pending if entry[0] != handoff}

    def close(self) -> None:
        """Forget everything."""
        self._pending.clear()
