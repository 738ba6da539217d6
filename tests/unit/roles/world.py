"""A prefill and a decode engine, real but for device and transport, stepped by hand: no thread, no clock, no array.

The device is that of the scheduler tests, whose pages know what they hold: a page that was not transferred, transferred wrongly
or reused too early is an error where it is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any, cast

from jdisagg.core.config import LocalPrefill, SchedulerConfig, TransferConfig
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import EngineRequest, Output, Role
from jdisagg.handoff.borrower import Borrower
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.events import FromPrefill, PeerMessage, PeerOpened
from jdisagg.handoff.lender import Lender
from jdisagg.handoff.messages import ChunkReady, DecodeToPrefill, HandoffId, Lending, Open, PrefillToDecode, StreamEnded
from jdisagg.handoff.prefill_side import PrefillSide
from jdisagg.roles.decode import DecodeRole
from jdisagg.roles.engine_loop import EngineLoop
from jdisagg.roles.inbox import Cancel, Inbox, Submit
from jdisagg.roles.kv_borrowing import KVBorrowing
from jdisagg.roles.kv_lending import KVLending
from jdisagg.roles.observer import TickObserver
from jdisagg.roles.pipeline import StepPipeline
from jdisagg.roles.prefill import PrefillRole
from jdisagg.roles.side import Side
from jdisagg.roles.streams import Streams
from jdisagg.sched.plan import PageTable, Plan, StepResult
from jdisagg.sched.scheduler import Scheduler
from jdisagg.transfer.base import Piece, PieceArrived, PieceFailed, Published
from jdisagg.transfer.choice import PublisherSet
from tests.unit.sched.content_fake import EOS
from tests.unit.sched.device_fake import FakeDevice
from tests.unit.sched.engine_fake import request

BYTES_PER_TOKEN = 4
CHUNK_TOKENS = 8
PEERS = ("p0", "p1")


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
        return handle

    def export_tokens(self, page_table: PageTable, begin: int, end: int, group: int = 0) -> Piece:
        assert 0 < end - begin <= CHUNK_TOKENS
        cells = self.device.pages.take(page_table[0], end)[begin:]
        return Piece(begin=begin, end=end, data=cast(Any, cells), group=group)

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

    def step(self) -> bool:
        """One transfer event."""
        if not self.transfers:
            return False
        self.transfers.popleft()()
        return True


class FakePublisher:
    name = "fake"

    def __init__(self, network: Network, inbox: Inbox) -> None:
        self._network = network
        self._inbox = inbox
        self._held: set[str] = set()

    def publish(self, handoff: HandoffId, key: str, piece: Piece) -> None:
        self._held.add(key)
        count = piece.end - piece.begin
        ready = ChunkReady(
            key=key, begin=piece.begin, end=piece.end, shape=(1, count, 1, 1), dtype="float32",
            num_bytes=count * BYTES_PER_TOKEN, checksum=1,
        )  # fmt: skip

        def store() -> None:
            if key in self._held:
                self._network.pieces[key] = piece
                self._inbox.post(Published(handoff=handoff, ready=ready))

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

        self._network.transfers.append(deliver)

    def cancel(self, handoff: HandoffId) -> None:
        """Nothing: late arrivals are what this world is about."""

    def close(self) -> None:
        """No thread."""


class Wire:
    """PeerClient and Reply in one: streams by D's HandoffId; P gets its own ids, like a gRPC server gives them."""

    def __init__(self, prefill: Inbox, decode: Inbox) -> None:
        self._prefill = prefill
        self._decode = decode
        self._serial = 0
        self.open_streams: dict[HandoffId, HandoffId] = {}
        self.down: set[str] = set()
        self.num_opened = 0

    def is_down(self, peer: str) -> bool:
        return peer in self.down

    def failures(self) -> dict[str, str]:
        return {peer: "down" if peer in self.down else "" for peer in PEERS}

    def open(self, peer: str, handoff: HandoffId, message: Open) -> None:
        assert peer not in self.down
        self.num_opened += 1
        self._serial += 1
        theirs = HandoffId(handoff.request_id, 1000 + self._serial)
        self.open_streams[handoff] = theirs
        self._prefill.post(PeerOpened(theirs, message, "d0", _Reply(self, handoff)))

    def send(self, handoff: HandoffId, message: DecodeToPrefill) -> None:
        if (theirs := self.open_streams.get(handoff)) is not None:
            self._prefill.post(PeerMessage(theirs, message))

    def close(self, handoff: HandoffId) -> None:
        if (theirs := self.open_streams.pop(handoff, None)) is not None:
            self._prefill.post(PeerMessage(theirs, StreamEnded(reason="closed")))

    def to_decode(self, handoff: HandoffId, message: PrefillToDecode) -> None:
        if handoff in self.open_streams:
            self._decode.post(FromPrefill(handoff, message))

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


class Engine:
    """One loop with its parts at hand."""

    def __init__(self, role: Role, num_pages: int, local_prefill: bool, *, page_size: int = 4, **settings: Any) -> None:
        defaults: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 12, "reserved_decode_tokens": 4}
        config = SchedulerConfig(**(defaults | settings))
        self.metrics = Metrics()
        self.inbox = Inbox()
        self.streams = Streams()
        self.runner = FakeRunner(num_pages, page_size)
        self.scheduler = Scheduler(
            config, role=role, max_model_len=48, page_size=page_size, num_pages=num_pages, eos_token_ids=(EOS,),
            local_prefill=local_prefill,
        )  # fmt: skip
        self.loop: EngineLoop | None = None
        self._role = role

    def run(self, side: Side, **options: Any) -> None:
        """Complete the engine with its role."""
        self.loop = EngineLoop(
            scheduler=self.scheduler,
            pipeline=StepPipeline(self.scheduler, self.runner),
            side=side,
            inbox=self.inbox,
            streams=self.streams,
            metrics=self.metrics,
            observer=TickObserver(self.scheduler, self.metrics, self._role),
            worker=self._role.value,
            **options,
        )

    def tick(self, now_s: float) -> bool:
        """One tick, invariants checked after it."""
        assert self.loop is not None
        busy = self.loop.tick(now_s)
        self.scheduler.check()
        return busy


class World:
    """Both engines and what clients have got."""

    def __init__(
        self,
        *,
        local_prefill: bool = True,
        decode_pages: int = 24,
        prefill_pages: int = 24,
        prefill_page_size: int = 4,
        slow_request_s: float = inf,
        want_min_tokens: int = 0,
        dtypes: tuple[str, str] = ("float32", "float32"),
    ) -> None:
        """`dtypes`: of P's and of D's KV, as they say; `want_min_tokens` 0: D lends and P never asks."""
        policy = LocalPrefill.ON_FAILURE if local_prefill else LocalPrefill.NEVER
        config = TransferConfig(transfer_chunk_tokens=CHUNK_TOKENS, transfer_buffer_bytes=96, local_prefill=policy)
        self.now_s = 0.0
        self.network = Network()
        self.prefill = Engine(Role.PREFILL, prefill_pages, local_prefill=True, page_size=prefill_page_size)
        self.decode = Engine(Role.DECODE, decode_pages, local_prefill=local_prefill)
        self.prefill.runner.meanwhile = self.network.step
        self.wire = Wire(self.prefill.inbox, self.decode.inbox)
        self.handoffs = DecodeSide(config, chunk_bytes_per_token=BYTES_PER_TOKEN, backend="fake")
        self.outputs: dict[str, list[Output]] = {}
        publisher = FakePublisher(self.network, self.prefill.inbox)
        self.lent = FakePublisher(self.network, self.decode.inbox)
        self.borrower = Borrower(config, bytes_per_token=BYTES_PER_TOKEN)
        borrowing = KVBorrowing(
            self.borrower, min_tokens=max(1, want_min_tokens), page_size=prefill_page_size, dtype=dtypes[0],
            scheduler=self.prefill.scheduler, runner=self.prefill.runner, metrics=self.prefill.metrics,
            fetcher=FakeFetcher(self.network, self.prefill.inbox, to_prefill=True),
        )  # fmt: skip
        self.lender = Lender(config, bytes_per_token=BYTES_PER_TOKEN)
        lending = KVLending(
            self.lender, Lending(address="d0", backend="fake", dtype=dtypes[1]), scheduler=self.decode.scheduler,
            runner=self.decode.runner, publisher=self.lent, metrics=self.decode.metrics,
        )  # fmt: skip
        self.prefill.run(
            PrefillRole(
                scheduler=self.prefill.scheduler,
                handoffs=PrefillSide(config, bytes_per_token=BYTES_PER_TOKEN),
                runner=self.prefill.runner,
                publishers=PublisherSet([publisher]),
                metrics=self.prefill.metrics,
                worker="p0",
                slow_request_s=slow_request_s,
                borrowing=borrowing if want_min_tokens else None,
            )
        )
        self.publisher = publisher
        self.decode.run(
            DecodeRole(
                config=config,
                scheduler=self.decode.scheduler,
                handoffs=self.handoffs,
                runner=self.decode.runner,
                peers=self.wire,
                fetcher=FakeFetcher(self.network, self.decode.inbox),
                streams=self.decode.streams,
                metrics=self.decode.metrics,
                static_peers=lambda: PEERS,
                page_size=4,
                lending=lending,
            ),
            slow_request_s=slow_request_s,
        )

    def submit(self, request: EngineRequest) -> None:
        """A client's request to D."""
        got = self.outputs.setdefault(request.request_id, [])
        self.decode.inbox.post(Submit(replace(request, attempt=0), lambda outputs: self._take(got, outputs)))

    def _take(self, got: list[Output], outputs: list[Output]) -> None:
        for output in outputs:
            mine = self.outputs.get(output.request_id)
            assert mine is not None, f"an output for {output.request_id}, which nobody asked for"
            mine.append(output)

    def cancel(self, request_id: str) -> None:
        self.decode.inbox.post(Cancel(request_id, 0))

    def tick(self) -> bool:
        """Everything once; False when nothing happened anywhere."""
        moved = self.network.step()
        self.now_s += 0.01
        return any([moved, self.prefill.tick(self.now_s), self.decode.tick(self.now_s)])

    def settle(self, max_ticks: int = 4000) -> None:
        """Run until nobody has anything to do, time passing quickly once nothing moves."""
        quiet = 0
        for _ in range(max_ticks):
            quiet = 0 if self.tick() else quiet + 1
            if quiet > 3:
                if self.decode.loop is not None and self.decode.loop.num_unfinished == 0 and not self.wire.open_streams:
                    break
                self.now_s += 0.5
        self.assert_quiescent()

    def tokens(self, request_id: str) -> list[int]:
        """All tokens a client got, in order."""
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def text(self) -> str:
        """All ledgers, for a failure."""
        parts = {"P": self.prefill.loop, "D": self.decode.loop}
        return "\n".join(f"{name}: {loop.snapshot() if loop else None}" for name, loop in parts.items())

    def assert_quiescent(self) -> None:
        """Nothing is left anywhere."""
        for engine in (self.prefill, self.decode):
            assert engine.scheduler.is_idle(), self.text()
            assert engine.scheduler.num_free_pages == engine.scheduler.num_pages
            assert len(engine.streams) == 0
        assert self.handoffs.is_idle, self.handoffs.snapshot()
        assert self.publisher.num_buffered_bytes == self.lent.num_buffered_bytes == 0
        assert self.borrower.is_idle, self.borrower.snapshot()
        assert self.lender.is_idle, self.lender.snapshot()
        assert not self.wire.open_streams


def two_full_pools() -> World:
    """A (prompt 1 to 20) holds pages of D and has lost its stream; B (2 to 30), computed, fills P's pool and waits for D's."""
    world = World(local_prefill=False, decode_pages=10, prefill_pages=10)
    world.submit(request("a", tuple(range(1, 21)), 4))
    world.submit(request("b", tuple(range(2, 31)), 4))
    for _ in range(4):
        world.prefill.tick(world.now_s)
        world.decode.tick(world.now_s)
    (stream,) = [handoff for handoff in world.wire.open_streams if handoff.request_id == "a"]
    world.wire.cut(stream, "dead")
    return world
