"""A decode worker, two prefill workers, their streams, engines and transfers, small enough to be stepped by hand.

It executes actions as the roles do and checks what must hold at every one of them. Streams keep order but may lose a message,
die, or be read late; transfers may fail, vanish, repeat, and come after the hand-off is over.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import Overloaded
from jdisagg.core.requests import EngineRequest, Output
from jdisagg.handoff import actions as act
from jdisagg.handoff.borrower import LONGEST_S, Borrowed, Borrower, BorrowerAction
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.lender import Lender, LenderAction
from jdisagg.handoff.messages import (
    Ack,
    Agreed,
    Awake,
    ChunkReady,
    Declined,
    DecodeToPrefill,
    Grant,
    HandoffId,
    Lending,
    Open,
    PrefillToDecode,
    Quiet,
    StreamEnded,
    Want,
)
from jdisagg.handoff.prefill_side import PrefillSide
from jdisagg.sched.stops import find_stop
from tests.unit.handoff.rig import BPT, ready

PEERS = ("p0", "p1")
BACKENDS = ("fake", "spare")
EOS = 8


@dataclass
class Stream:
    """Both directions of one stream."""

    handoff: HandoffId
    peer: str
    down: deque[DecodeToPrefill] = field(default_factory=deque)
    up: deque[PrefillToDecode] = field(default_factory=deque)
    backend: str = BACKENDS[0]  # what P publishes over
    open_at_decode: bool = True
    open_at_prefill: bool = True
    hushed: bool = False  # nothing that P says comes through, and D has noticed


@dataclass
class Client:
    """What the world knows of one request at D."""

    request: EngineRequest
    in_place: set[int]
    reserved: bool = False
    tokens: int = 0
    ends: list[str] = field(default_factory=list)
    imported: dict[HandoffId, set[int]] = field(default_factory=dict)
    serial: int = 0


@dataclass
class Prefiller:
    """One prefill worker: its side, its engine's requests, what it has published."""

    side: PrefillSide
    engine: dict[str, EngineRequest] = field(default_factory=dict)
    requests: dict[str, EngineRequest] = field(default_factory=dict)  # all it was ever asked
    computed: dict[str, int] = field(default_factory=dict)
    exporting: list[act.Export] = field(default_factory=list)
    held_bytes: dict[str, int] = field(default_factory=dict)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    credit: dict[HandoffId, int] = field(default_factory=dict)
    spent: dict[HandoffId, int] = field(default_factory=dict)
    full: bool = False
    borrower: Borrower = field(kw_only=True)
    borrowing: dict[str, HandoffId] = field(default_factory=dict)  # engine requests whose pages are still to come, or KV
    in_place: dict[str, set[int]] = field(default_factory=dict)  # what each of them has

    @property
    def unreserved(self) -> list[str]:
        """Borrowing requests that wait for pages."""
        return [engine_id for engine_id, state in self.borrower.snapshot().items() if not state["reserved"]]


class World:
    """Everything, and the time."""

    def __init__(self, config: TransferConfig) -> None:
        self.config = config
        self.now_s = 0.0
        self.keys = itertools.count()
        self.decode = DecodeSide(config, chunk_bytes_per_token=BPT, backend="fake", eos_token_ids=(EOS,))
        self.prefillers = {peer: self._prefiller(peer) for peer in PEERS}
        self.clients: dict[str, Client] = {}
        self.streams: dict[HandoffId, Stream] = {}
        self.fetches: list[act.Fetch] = []
        self.arriving: str | None = None
        self.lender = Lender(config, bytes_per_token=BPT, new_key=lambda: f"d-{next(self.keys)}")
        self.lent: dict[str, act.Export] = {}  # exported by D and not discarded
        self.lending: list[act.Export] = []  # on their way to being published
        self.loans: list[act.Fetch] = []  # fetches of P
        self.borrowed: list[Borrowed] = []
        self.borrow_always = False

    def _prefiller(self, peer: str) -> Prefiller:
        new_key = lambda: f"{peer}-{next(self.keys)}"  # noqa: E731
        borrower = Borrower(self.config, bytes_per_token=BPT)
        return Prefiller(PrefillSide(self.config, bytes_per_token=BPT, new_key=new_key), borrower=borrower)

    # --- decode role

    def start(self, request: EngineRequest, held: int, peers: tuple[str, ...]) -> None:
        self.clients[request.request_id] = Client(request, set(range(held)))
        self.run_decode(self.decode.start(request, held, peers, self.now_s))

    def reserve(self, request_id: str) -> None:
        self.clients[request_id].reserved = True
        self.run_decode(self.decode.on_reserved(request_id, self.now_s))

    def release(self, request_id: str) -> None:
        client = self.clients[request_id]
        self.run_decode(self.decode.release(request_id))
        if not client.ends:
            client.ends.append("released")

    def run_decode(self, actions: Sequence[act.DecodeAction]) -> None:
        for action in actions:
            self._run_decode_action(action)

    def _run_decode_action(self, action: act.DecodeAction) -> None:
        match action:
            case act.OpenStream(handoff=handoff, peer=peer, message=message):
                client = self.clients[handoff.request_id]
                assert handoff.serial > client.serial
                assert set(range(message.held_tokens)) <= client.in_place, "it holds what it says"
                client.serial = handoff.serial
                stream = Stream(handoff, peer)
                if message.held_tokens:
                    self.lender.open(handoff, message.held_tokens)
                    message = replace(message, lending=Lending(address="d0", backend="fake", dtype="bfloat16"))
                stream.down.append(message)
                stream.up.append(Agreed(backends=BACKENDS))
                self.streams[handoff] = stream
            case act.Send(handoff=handoff, message=message):
                stream = self.streams[handoff]
                assert stream.open_at_decode, "nothing is sent on a closed stream"
                if isinstance(message, Grant):
                    assert self.clients[handoff.request_id].reserved, "no credit before memory"
                stream.down.append(message)
            case act.CloseStream(handoff=handoff):
                self.run_lender(self.lender.release(handoff))
                stream = self.streams[handoff]
                stream.open_at_decode = False
                stream.down.clear()
                stream.down.append(StreamEnded(reason="closed"))
            case act.Fetch():
                assert action.deadline_s <= self.clients[action.handoff.request_id].request.deadline_s
                self.fetches.append(action)
            case act.CancelFetch():
                pass  # what was fetched may still arrive: the worst case
            case act.Import(request_id=request_id, handoff=handoff, key=key):
                self._import(request_id, handoff, key)
            case act.FirstToken(request_id=request_id, output=output):
                client = self.clients[request_id]
                client.tokens += 1
                assert client.tokens == 1
                assert not client.ends
                assert output.request_id == request_id
                if output.finish is not None:
                    client.ends.append("finished")
            case act.KVComplete(request_id=request_id):
                client = self.clients[request_id]
                assert client.in_place == set(range(len(client.request.token_ids)))
                assert (client.tokens, client.reserved) == (1, True)
                client.ends.append("complete")
            case act.ComputeLocally(request_id=request_id, held_tokens=held):
                client = self.clients[request_id]
                assert set(range(held)) <= client.in_place
                client.ends.append("local")
            case act.Fail(request_id=request_id):
                self.clients[request_id].ends.append("failed")
            case act.Recovered():
                assert action.rung in ("refetch", "other_backend", "reconnect", "other_prefill", "local_prefill")

    def _import(self, request_id: str, handoff: HandoffId, key: str) -> None:
        client = self.clients[request_id]
        assert key == self.arriving, "only the piece that just arrived"
        assert client.reserved, "pages first"
        assert not client.ends, "nothing is scattered after the end"
        assert self.streams[handoff].open_at_decode, "only of the newest stream, and of the one it is doubted for"
        begin, end = self.prefillers[self.streams[handoff].peer].ranges[key]
        positions = set(range(begin, end))
        mine = client.imported.setdefault(handoff, set())
        assert not positions & mine, "every position once per stream"
        mine |= positions
        client.in_place |= positions

    # --- the mirror

    def run_lender(self, actions: Sequence[LenderAction]) -> None:
        for action in actions:
            match action:
                case act.Export(handoff=handoff, begin=begin, end=end, key=key):
                    assert self.streams[handoff].open_at_decode, "nothing is lent once the stream is over"
                    assert set(range(begin, end)) <= self.clients[handoff.request_id].in_place, "only what D holds"
                    assert 0 < end - begin <= self.config.transfer_chunk_tokens
                    self.lent[key] = action
                    self.lending.append(action)
                    lent_bytes = self.lender.buffered_bytes
                    assert lent_bytes <= self.config.transfer_buffer_bytes or len(self.lent) == 1, "bounded buffer"
                case act.Discard(key=key):
                    self.lent.pop(key, None)
                case act.Send(handoff=handoff, message=message):
                    stream = self.streams[handoff]
                    if stream.open_at_decode:
                        stream.down.append(message)
                case _:
                    raise AssertionError(action)

    def publish_lent(self, outcome: str) -> None:
        export = self.lending.pop(0)
        if outcome == "fail" and export.key in self.lent:
            self.run_lender(self.lender.on_publish_failed(export.handoff, export.key, "device"))
        elif outcome == "ok":
            message = ready(export.key, export.begin, export.end)
            self.run_lender(self.lender.on_published(export.handoff, message, self.now_s))

    def run_borrower(self, peer: str, actions: Sequence[BorrowerAction]) -> None:
        worker = self.prefillers[peer]
        for action in actions:
            match action:
                case act.Reply():
                    self.run_prefill(peer, [action])
                case act.Fetch():
                    assert action.deadline_s <= self.now_s + LONGEST_S
                    self.loans.append(action)
                case act.CancelFetch():
                    pass  # what was fetched may still arrive
                case act.Import(request_id=engine_id, key=key):
                    assert key == self.arriving, "only the piece that just arrived"
                    begin, end = self.loan_ranges[key]
                    assert not set(range(begin, end)) & worker.in_place[engine_id], "every position once"
                    worker.in_place[engine_id] |= set(range(begin, end))
                case Borrowed(engine_request_id=engine_id, held_tokens=held):
                    del worker.borrowing[engine_id]
                    in_place = worker.in_place.pop(engine_id)
                    assert set(range(held)) <= in_place, "what it says is in place"
                    assert held < len(worker.requests[engine_id].token_ids), "one token is left to compute"
                    worker.engine[engine_id] = worker.requests[engine_id]
                    worker.computed[engine_id] = held
                    self.borrowed.append(action)

    def borrow(self, peer: str, admit: act.Admit) -> bool:
        """As the role does, for every second hand-off or all: P has the first token in its cache."""
        end = min(admit.held_tokens, len(admit.request.token_ids) - 1)
        if admit.lending is None or end <= 1 or (admit.handoff.serial % 2 and not self.borrow_always):
            return False
        worker, engine_id = self.prefillers[peer], admit.request.request_id
        worker.borrowing[engine_id] = admit.handoff
        worker.in_place[engine_id] = {0}
        worker.borrower.start(admit.handoff, engine_id, admit.lending, (1, end), admit.request.deadline_s)
        return True

    def reserve_at_prefill(self, peer: str, engine_id: str) -> None:
        self.run_borrower(peer, self.prefillers[peer].borrower.on_reserved(engine_id, self.now_s))

    def finish_loan(self, peer: str, fetch: act.Fetch, outcome: str) -> None:
        """As finish_fetch."""
        if outcome != "again":
            self.loans.remove(fetch)
        if outcome == "lost":
            return
        borrower, key = self.prefillers[peer].borrower, fetch.ready.key
        if outcome in ("ok", "again") and key in self.lent:
            self.arriving = key
            self.run_borrower(peer, borrower.on_arrived(fetch.handoff, key, self.now_s))
            self.arriving = None
        else:
            reason = "unknown_key" if key not in self.lent else outcome
            self.run_borrower(peer, borrower.on_failed(fetch.handoff, key, reason))

    @property
    def loan_ranges(self) -> dict[str, tuple[int, int]]:
        return {key: (export.begin, export.end) for key, export in self.lent.items()}

    # --- prefill role

    def run_prefill(self, peer: str, actions: Sequence[act.PrefillAction]) -> None:
        worker = self.prefillers[peer]
        for action in actions:
            match action:
                case act.Admit(handoff=handoff, request=request):
                    if worker.full:
                        self.run_prefill(peer, worker.side.on_refused(handoff, Overloaded("full")))
                    else:
                        assert request.request_id not in worker.engine
                        worker.engine[request.request_id] = worker.requests[request.request_id] = request
                        worker.computed[request.request_id] = 0
                        if self.borrow(peer, action):
                            del worker.engine[request.request_id]
                        self.run_prefill(peer, worker.side.on_admitted(handoff, 0))
                case act.Reply(handoff=handoff, message=message):
                    self.streams[handoff].up.append(message)
                case act.CloseReply(handoff=handoff):
                    stream = self.streams[handoff]
                    if stream.open_at_prefill:
                        stream.open_at_prefill = False
                        stream.up.append(StreamEnded(reason="closed"))
                case act.Export(handoff=handoff, engine_request_id=engine_id, begin=begin, end=end, key=key):
                    assert end <= worker.computed[engine_id], "only what is computed"
                    assert 0 < end - begin <= self.config.transfer_chunk_tokens
                    size = (end - begin) * BPT
                    worker.spent[handoff] = worker.spent.get(handoff, 0) + size
                    assert worker.spent[handoff] <= worker.credit[handoff], "credit is never exceeded"
                    worker.ranges[key] = (begin, end)
                    worker.held_bytes[key] = size
                    held = sum(worker.held_bytes.values())
                    assert held <= self.config.transfer_buffer_bytes or len(worker.held_bytes) == 1, "bounded buffer"
                    worker.exporting.append(action)
                case act.Discard(key=key):
                    worker.held_bytes.pop(key, None)
                case act.Unpark(engine_request_id=engine_id):
                    assert worker.computed[engine_id] == 0, "it was parked"
                    worker.engine[engine_id] = worker.requests[engine_id]
                case act.ReleaseRequest(engine_request_id=engine_id):
                    worker.engine.pop(engine_id, None)
                    worker.in_place.pop(engine_id, None)
                    if handoff := worker.borrowing.pop(engine_id, None):
                        self.run_borrower(peer, worker.borrower.release(handoff))

    def deliver_down(self, stream: Stream) -> None:
        message = stream.down.popleft()
        worker = self.prefillers[stream.peer]
        if not stream.open_at_prefill and not isinstance(message, StreamEnded):
            return
        match message:
            case Open():
                self.run_prefill(stream.peer, worker.side.open(stream.handoff, message, self.now_s))
                return
            case Grant(credit_bytes=credit):
                worker.credit[stream.handoff] = max(credit, worker.credit.get(stream.handoff, 0))
            case StreamEnded():
                stream.open_at_prefill = False
            case Want(backend=backend):
                stream.backend = backend or stream.backend
            case _:
                pass
        self.run_prefill(stream.peer, worker.side.on_message(stream.handoff, message, self.now_s))
        if isinstance(message, ChunkReady | Declined):
            self.run_borrower(stream.peer, worker.borrower.on_message(stream.handoff, message, self.now_s))

    def deliver_up(self, stream: Stream) -> None:
        message = stream.up.popleft()
        if stream.open_at_decode and isinstance(message, Want | Grant | Ack):
            self.run_lender(self.lender.on_message(stream.handoff, message, self.now_s))
        elif stream.open_at_decode:
            self.run_decode(self.decode.on_message(stream.handoff, message, self.now_s))

    def compute(self, peer: str, engine_id: str, tokens: int) -> None:
        worker = self.prefillers[peer]
        total = len(worker.engine[engine_id].token_ids)
        worker.computed[engine_id] = min(total, worker.computed[engine_id] + tokens)
        self.run_prefill(peer, worker.side.on_computed(engine_id, worker.computed[engine_id]))
        if worker.computed[engine_id] < total:
            return
        request = worker.engine.pop(engine_id)
        token_id = EOS if len(request.token_ids) % 5 == 0 else 9  # every fifth length samples EOS
        finish, stop_token_id = find_stop(token_id, 1, request.sampling, (EOS,)) or (None, None)
        output = Output(request_id=engine_id, token_ids=(token_id,), finish=finish, stop_token_id=stop_token_id)
        self.run_prefill(peer, worker.side.on_first_token(engine_id, output))

    def park(self, peer: str, engine_id: str) -> None:
        """Its pages go to others."""
        worker = self.prefillers[peer]
        worker.computed[engine_id] = 0
        self.run_prefill(peer, worker.side.on_parked(engine_id))

    def publish(self, peer: str, outcome: str) -> None:
        worker = self.prefillers[peer]
        export = worker.exporting.pop(0)
        begin, end = export.begin, export.end
        if outcome == "fail":
            if export.key in worker.held_bytes:
                worker.spent[export.handoff] -= worker.held_bytes[export.key]  # D never hears of it
                actions = worker.side.on_publish_failed(export.handoff, export.key, "device", self.now_s)
                self.run_prefill(peer, actions)
        elif outcome == "ok":
            actions = worker.side.on_published(
                export.handoff, ready(export.key, begin, end, self.streams[export.handoff].backend), self.now_s
            )
            self.run_prefill(peer, actions)

    # --- transfer

    def finish_fetch(self, fetch: act.Fetch, outcome: str) -> None:
        """`outcome`: ok, again (arrives, and once more later), lost, or a reason to fail with."""
        if outcome != "again":
            self.fetches.remove(fetch)
        if outcome == "lost":
            return
        ready_now: ChunkReady = fetch.ready
        gone = ready_now.key not in self.prefillers[fetch.peer].held_bytes
        if outcome in ("ok", "again") and not gone:
            self.arriving = ready_now.key
            self.run_decode(self.decode.on_arrived(fetch.handoff, ready_now.key, self.now_s))
            self.arriving = None
        else:
            reason = "unknown_key" if gone else outcome if outcome not in ("ok", "again") else "connection"
            self.run_decode(self.decode.on_failed(fetch.handoff, ready_now.key, reason, self.now_s))

    # --- trouble and time

    def kill(self, stream: Stream) -> None:
        """The connection breaks: messages under way are lost, both ends hear of it."""
        stream.hushed = False
        for messages, is_open in ((stream.down, stream.open_at_prefill), (stream.up, stream.open_at_decode)):
            messages.clear()
            if is_open:
                messages.append(StreamEnded(reason="dead"))

    def hush(self, stream: Stream) -> None:
        """D notices that nothing comes any more."""
        stream.hushed = True
        self.run_decode(self.decode.on_message(stream.handoff, Quiet(0.6), self.now_s))

    def wake(self, stream: Stream) -> None:
        """It comes after all, the oldest first."""
        stream.hushed = False
        stream.up.appendleft(Awake())

    def restart(self, peer: str) -> None:
        """A prefill worker dies and comes back empty."""
        self.prefillers[peer] = self._prefiller(peer)
        for stream in self.streams.values():
            if stream.peer == peer:
                stream.open_at_prefill = stream.hushed = False
                stream.down.clear()
                stream.up.append(StreamEnded(reason="dead"))

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        if seconds >= 1.0:  # who was quiet for so long is dead
            for stream in [stream for stream in self.streams.values() if stream.hushed]:
                stream.hushed = False
                stream.up = deque([StreamEnded(reason="heartbeat")])
        self.run_lender(self.lender.tick(self.now_s))
        self.run_decode(self.decode.tick(self.now_s))
        for peer in PEERS:
            self.run_borrower(peer, self.prefillers[peer].borrower.tick(self.now_s))
            self.run_prefill(peer, self.prefillers[peer].side.tick(self.now_s))

    def settle(self) -> None:
        """Deliver and compute everything that is there."""
        for _ in range(2000):
            busy = False
            for stream in list(self.streams.values()):
                while stream.down:
                    busy, _ = True, self.deliver_down(stream)
                while stream.up and not stream.hushed:
                    busy, _ = True, self.deliver_up(stream)
            while self.lending:
                busy, _ = True, self.publish_lent("ok")
            for fetch in list(self.loans):
                busy, _ = True, self.finish_loan(self.streams[fetch.handoff].peer, fetch, "ok")
            for peer, worker in self.prefillers.items():
                for engine_id in worker.unreserved:
                    busy, _ = True, self.reserve_at_prefill(peer, engine_id)
                for engine_id in list(worker.engine):
                    busy, _ = True, self.compute(peer, engine_id, 3)
                while worker.exporting:
                    busy, _ = True, self.publish(peer, "ok")
            for fetch in list(self.fetches):
                busy, _ = True, self.finish_fetch(fetch, "ok")
            if not busy:
                return
        raise AssertionError("the world does not come to rest")
