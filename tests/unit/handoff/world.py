"""A decode worker, two prefill workers, their streams, engines and transfers, small enough to be stepped by hand.

It executes actions as the roles do and checks what must hold at every one of them. Streams keep order but may lose a message,
die, or be read late; transfers may fail, vanish, repeat, and come after the hand-off is over.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from jdisagg.core.config import TransferConfig
from jdisagg.core.requests import EngineRequest
from jdisagg.handoff import actions as act
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.messages import (
    Ack,
    Agreed,
    Awake,
    ChunkReady,
    Declined,
    Grant,
    HandoffId,
    Lending,
    Open,
    Quiet,
    StreamEnded,
    Want,
)
from tests.unit.handoff.loans import Loans
from tests.unit.handoff.parties import BACKENDS, Client, Stream
from tests.unit.handoff.prefiller import EOS, Prefiller
from tests.unit.handoff.rig import BPT

PEERS = ("p0", "p1")


class World:
    """Everything, and the time."""

    def __init__(self, config: TransferConfig) -> None:
        self.config = config
        self.now_s = 0.0
        self.known: tuple[str, ...] = ()  # whom requests may ask besides those that they were begun with
        self.keys = itertools.count()
        self.decode = DecodeSide(config, chunk_bytes_per_token=BPT, backend="fake", eos_token_ids=(EOS,))
        self.clients: dict[str, Client] = {}
        self.streams: dict[HandoffId, Stream] = {}
        self.loans = Loans(config, self.keys, self.streams, self.clients)
        self.prefillers = {peer: self._prefiller(peer) for peer in PEERS}
        self.fetches: list[act.Fetch] = []
        self.arriving: str | None = None

    def _prefiller(self, peer: str) -> Prefiller:
        return Prefiller(peer, self.config, self.keys, self.streams, self.loans)

    # --- decode role

    def start(self, request: EngineRequest, held: int, peers: tuple[str, ...]) -> None:
        self.clients[request.request_id] = Client(request, set(range(held)))
        self.run_decode(self.decode.start(request, held, peers, self.now_s, lambda: self.known))

    def reserve(self, request_id: str) -> None:
        self.clients[request_id].reserved = True
        self.run_decode(self.decode.on_reserved(request_id, self.now_s))

    def release(self, request_id: str) -> None:
        client = self.clients[request_id]
        if not client.ends:
            client.ends.append("released")  # the scheduler has dropped its pages
        self.run_decode(self.decode.release(request_id))

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
                    self.loans.lender.open(handoff, message.held_tokens)
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
                self.loans.run(self.loans.lender.release(handoff))
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
                self.clients[request_id].error = action.error
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

    # --- prefill role

    def deliver_down(self, stream: Stream) -> None:
        message = stream.down.popleft()
        worker = self.prefillers[stream.peer]
        if not stream.open_at_prefill and not isinstance(message, StreamEnded):
            return
        match message:
            case Open():
                worker.run(worker.side.open(stream.handoff, message, self.now_s), self.now_s)
                return
            case Grant(credit_bytes=credit):
                worker.credit[stream.handoff] = max(credit, worker.credit.get(stream.handoff, 0))
            case StreamEnded():
                stream.open_at_prefill = False
            case Want(backend=backend):
                stream.backend = backend or stream.backend
            case _:
                pass
        worker.run(worker.side.on_message(stream.handoff, message, self.now_s), self.now_s)
        if isinstance(message, ChunkReady | Declined):
            worker.run_borrower(worker.borrower.on_message(stream.handoff, message, self.now_s), self.now_s)

    def deliver_up(self, stream: Stream) -> None:
        message = stream.up.popleft()
        if stream.open_at_decode and isinstance(message, Want | Grant | Ack):
            self.loans.run(self.loans.lender.on_message(stream.handoff, message, self.now_s))
        elif stream.open_at_decode:
            self.run_decode(self.decode.on_message(stream.handoff, message, self.now_s))

    def compute(self, peer: str, engine_id: str, tokens: int) -> None:
        self.prefillers[peer].compute(engine_id, tokens, self.now_s)

    def park(self, peer: str, engine_id: str) -> None:
        self.prefillers[peer].park(engine_id, self.now_s)

    def publish(self, peer: str, outcome: str) -> None:
        self.prefillers[peer].publish(outcome, self.now_s)

    # --- the mirror

    def publish_lent(self, outcome: str) -> None:
        self.loans.publish(outcome, self.now_s)

    def reserve_at_prefill(self, peer: str, engine_id: str) -> None:
        worker = self.prefillers[peer]
        worker.run_borrower(worker.borrower.on_reserved(engine_id, self.now_s), self.now_s)

    def finish_loan(self, peer: str, fetch: act.Fetch, outcome: str) -> None:
        self.prefillers[peer].finish_loan(fetch, outcome, self.now_s)

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
        self.loans.run(self.loans.lender.tick(self.now_s))
        self.run_decode(self.decode.tick(self.now_s))
        for worker in self.prefillers.values():
            worker.run_borrower(worker.borrower.tick(self.now_s), self.now_s)
            worker.run(worker.side.tick(self.now_s), self.now_s)

    def settle(self) -> None:
        """Deliver and compute everything that is there."""
        for _ in range(2000):
            busy = False
            for stream in list(self.streams.values()):
                while stream.down:
                    busy, _ = True, self.deliver_down(stream)
                while stream.up and not stream.hushed:
                    busy, _ = True, self.deliver_up(stream)
            while self.loans.lending:
                busy, _ = True, self.publish_lent("ok")
            for fetch in list(self.loans.fetches):
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
