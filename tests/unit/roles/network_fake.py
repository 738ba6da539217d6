"""What lies between a prefill worker and its decode workers: devices whose pieces are lists of cells, transfers and streams.

The device is that of the scheduler tests, whose pages know what they hold: a page that was not transferred, transferred wrongly
or reused too early is an error where it is read.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from jdisagg.core.fleet import DRAINING
from jdisagg.handoff.events import FromPrefill, PeerMessage, PeerOpened
from jdisagg.handoff.messages import Agreed, ChunkReady, DecodeToPrefill, HandoffId, Open, PrefillToDecode, StreamEnded
from jdisagg.roles.inbox import Inbox
from jdisagg.roles.ports import PeerClient
from jdisagg.sched.plan import PageTable, Plan, StepResult
from jdisagg.transfer.base import Piece, PieceArrived, PieceFailed, Published, PublishFailed
from tests.unit.sched.device_fake import FakeDevice

BYTES_PER_TOKEN = 4
CHUNK_TOKENS = 8
PEERS = ("p0", "p1")
STREAMS_PER_WORKER = 10_000  # P's ids of streams never meet


class FakeRunner:
    """The fake device behind the Runner protocol; pieces are lists of cells. Steps are done at once or, with `meanwhile`, at
    the second look: it is called at the first one."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.device = FakeDevice(num_pages, page_size)
        self.meanwhile: Callable[[], object] | None = None
        self.is_running = False

    def dispatch(self, plan: Plan) -> StepResult:
        return self.device.dispatch(plan)

    def is_done(self, handle: StepResult) -> bool:
        self.is_running = not self.is_running and self.meanwhile is not None
        if self.is_running and self.meanwhile is not None:
            self.meanwhile()
        return not self.is_running

    def collect(self, handle: StepResult) -> StepResult:
        self.device.known(handle)
        return handle

    def export_tokens(self, page_table: PageTable, begin: int, end: int) -> Piece:
        assert 0 < end - begin <= CHUNK_TOKENS
        cells = self.device.pages.take(page_table[0], end)[begin:]
        return Piece(begin=begin, end=end, data=cast(Any, cells))

    def import_tokens(self, page_table: PageTable, piece: Piece) -> None:
        for position, cell in enumerate(cast(Any, piece.data), start=piece.begin):
            assert cell.position == position, f"a piece of [{piece.begin}, {piece.end}) has {cell}"
            self.device.pages.write(page_table[0], cell)


class Network:
    """Everything under way between the engines, one queue per direction and kind, so that nothing overtakes on a stream."""

    def __init__(self) -> None:
        self.transfers: deque[Callable[[], None]] = deque()
        self.pieces: dict[str, Piece] = {}
        self.lose_next = 0
        self.lose_lent = 0  # the same for pieces on their way to P
        self.fetches: list[tuple[HandoffId, str, float]] = []  # for whom, from whom, until when
        self.called_off: list[HandoffId] = []  # whose fetches are over for their receiver

    def step(self) -> bool:
        """One transfer event."""
        if not self.transfers:
            return False
        self.transfers.popleft()()
        return True


class FakePublisher:
    """`published`: the ranges that it was given, in order. While `trouble` names a reason, the next ones fail for it. With
    `stays` pieces lie on the device until they are discarded, as whole chunks; `most_held` of them there were."""

    def __init__(self, network: Network, inbox: Inbox, name: str = "fake") -> None:
        self.name = name
        self.published: list[tuple[int, int]] = []
        self.trouble: list[str] = []  # one piece each
        self.stays = False
        self.most_held = 0
        self._network = network
        self._inbox = inbox
        self._held: set[str] = set()

    def publish(self, handoff: HandoffId, key: str, piece: Piece) -> None:
        self.published.append((piece.begin, piece.end))
        if self.trouble:
            failed = PublishFailed(
                handoff=handoff, key=key, begin=piece.begin, end=piece.end, reason=self.trouble.pop(0), backend=self.name
            )
            self._network.transfers.append(lambda: self._inbox.post(failed))
            return
        self._held.add(key)
        self.most_held = max(self.most_held, len(self._held))
        count = piece.end - piece.begin
        ready = ChunkReady(
            key=key, begin=piece.begin, end=piece.end, shape=(1, count, 1, 1), dtype="float32",
            num_bytes=count * BYTES_PER_TOKEN, checksum=1, backend=self.name,
        )  # fmt: skip

        def store() -> None:
            if key in self._held:
                self._network.pieces[key] = piece
                self._inbox.post(Published(handoff=handoff, ready=ready, stays_tokens=CHUNK_TOKENS * self.stays))

        self._network.transfers.append(store)

    def discard(self, key: str) -> None:
        self._held.discard(key)
        self._network.pieces.pop(key, None)

    @property
    def num_buffered_bytes(self) -> int:
        return len(self._held)

    def close(self) -> None:
        self._held.clear()


class FakeFetcher:
    name = "fake"

    def __init__(self, network: Network, inbox: Inbox, *, to_prefill: bool = False) -> None:
        self._network = network
        self._inbox = inbox
        self._to_prefill = to_prefill

    def _is_lost(self) -> bool:
        name = "lose_lent" if self._to_prefill else "lose_next"
        left = getattr(self._network, name)
        setattr(self._network, name, max(0, left - 1))
        return left > 0

    def fetch(self, handoff: HandoffId, peer: str, ready: ChunkReady, deadline_s: float) -> None:
        def deliver() -> None:
            piece = self._network.pieces.get(ready.key)
            if self._is_lost():
                self._inbox.post(PieceFailed(handoff=handoff, ready=ready, reason="connection"))
            elif piece is None:
                self._inbox.post(PieceFailed(handoff=handoff, ready=ready, reason="unknown_key"))
            else:
                self._inbox.post(PieceArrived(handoff=handoff, ready=ready, piece=piece, seconds=0.0))

        self._network.fetches.append((handoff, peer, deadline_s))
        self._network.transfers.append(deliver)

    def cancel(self, handoff: HandoffId) -> None:
        """It comes all the same: late arrivals are what this world is about."""
        self._network.called_off.append(handoff)

    def close(self) -> None:
        """No thread."""


class Wire(PeerClient):
    """PeerClient and ReplyStream in one: streams by D's HandoffId; P gets its own ids, like a gRPC server gives them."""

    def __init__(self, prefill: Inbox, decode: Inbox, *, number: int = 0) -> None:
        """Of decode worker `number`, which calls itself d0, d1, ..."""
        self._prefill = prefill
        self._decode = decode
        self.name = f"d{number}"
        self._next_id = itertools.count(STREAMS_PER_WORKER * (number + 1))
        self.open_streams: dict[HandoffId, HandoffId] = {}
        self.down: set[str] = set()
        self.draining: set[str] = set()
        self.refusing: set[str] = set()
        self.without_kv: set[str] = set()
        self.num_opened = 0

    def is_down(self, peer: str) -> bool:
        return peer in self.down | self.draining

    def is_doubtful(self, peer: str) -> bool:
        return peer in self.refusing

    def no_kv(self, peer: str, why: str) -> None:
        self.without_kv.add(peer)

    def kv_came(self, peer: str) -> None:
        self.without_kv.discard(peer)

    def snapshot(self) -> dict[str, Any]:
        return dict(self.failures())

    def failures(self) -> dict[str, str]:
        return {peer: DRAINING if peer in self.draining else "down" if peer in self.down else "" for peer in PEERS}

    def open(self, peer: str, handoff: HandoffId, message: Open) -> None:
        assert peer not in self.down
        self.num_opened += 1
        theirs = HandoffId(handoff.request_id, next(self._next_id))
        self.open_streams[handoff] = theirs
        self._decode.post(FromPrefill(handoff, Agreed(backends=("fake",))))
        self._prefill.post(PeerOpened(theirs, message, self.name, _Reply(self, handoff)))

    def send(self, handoff: HandoffId, message: DecodeToPrefill) -> None:
        if (theirs := self.open_streams.get(handoff)) is not None:
            self._prefill.post(PeerMessage(theirs, message))

    def close(self, handoff: HandoffId) -> None:
        if (theirs := self.open_streams.pop(handoff, None)) is not None:
            self._prefill.post(PeerMessage(theirs, StreamEnded(reason="closed")))

    def to_decode(self, handoff: HandoffId, message: PrefillToDecode) -> None:
        if handoff in self.open_streams:
            self._decode.post(FromPrefill(handoff, message))

    def vanish(self) -> None:
        """This worker dies: P learns it by and by."""
        for theirs in self.open_streams.values():
            self._prefill.post(PeerMessage(theirs, StreamEnded(reason="heartbeat")))
        self.open_streams.clear()

    def cut(self, handoff: HandoffId, reason: str) -> None:
        """The connection breaks: both sides learn it."""
        if (theirs := self.open_streams.pop(handoff, None)) is not None:
            self._prefill.post(PeerMessage(theirs, StreamEnded(reason=reason)))
            self._decode.post(FromPrefill(handoff, StreamEnded(reason=reason)))


class _Reply:
    def __init__(self, wire: Wire, handoff: HandoffId) -> None:
        self._wire = wire
        self._handoff = handoff

    def send(self, message: PrefillToDecode) -> None:
        self._wire.to_decode(self._handoff, message)

    def close(self) -> None:
        self._wire.cut(self._handoff, "closed")
