"""The decode role: prompts are computed by P, their KV is fetched, and tokens stream from here.

    client request -> scheduler.add(remote) -> DecodeSide.start: stream to P opens before memory exists
    P has begun: scheduler reserves pages   -> credit granted, pieces fetched by transfer threads
    piece confirmed on this mesh            -> scattered by this thread, acknowledged
    all tokens in, first token known        -> READY, a slot, decode steps

`DecodeSide` (handoff) decides, this class executes: its actions are the only way this role touches peers, transfers, the
scheduler's remote sequences and the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from jdisagg.core.config import TransferConfig
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import EngineRequest, Output
from jdisagg.handoff import actions as act
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.events import FromPrefill
from jdisagg.handoff.messages import Ack, Grant, Want
from jdisagg.roles.inbox import Message
from jdisagg.roles.kv_lending import KVLending
from jdisagg.roles.peer_choice import KnownPeers, PeerChoice
from jdisagg.roles.ports import PeerClient, Runner
from jdisagg.roles.provenance_book import ProvenanceBook
from jdisagg.roles.recoveries import Recoveries
from jdisagg.roles.streams import Streams
from jdisagg.roles.transfers import HiddenTransfers, Transfers
from jdisagg.sched.plan import Plan
from jdisagg.sched.scheduler import Scheduler
from jdisagg.transfer.base import Fetcher, Piece, PieceArrived, PieceFailed, Published, PublishFailed


class DecodeRole:
    """An EngineRole that executes what DecodeSide decides."""

    num_guests = 0  # everything here is a client's

    def __init__(
        self,
        *,
        config: TransferConfig,
        scheduler: Scheduler,
        handoffs: DecodeSide,
        runner: Runner,
        peers: PeerClient,
        fetcher: Fetcher,
        streams: Streams,
        metrics: Metrics,
        known_peers: KnownPeers,
        page_size: int,
        lending: KVLending,
    ) -> None:
        """`known_peers`: for requests that name none."""
        self._scheduler = scheduler
        self._handoffs = handoffs
        self._runner = runner
        self._peers = peers
        self._fetcher = fetcher
        self._streams = streams
        self._peer_choice = PeerChoice(config, peers, known_peers)
        self._lending = lending
        self._recoveries = Recoveries(metrics, peers)
        self._transfers = Transfers(metrics)
        self._hidden = HiddenTransfers(metrics)
        self._provenance = ProvenanceBook(page_size)
        self._self_tests: set[str] = set()
        self._early: list[Output] = []

    # --- requests

    def admit(self, request: EngineRequest, now_s: float) -> None:
        """Queue it REMOTE and open its hand-off, or compute a short prompt here when configured so."""
        if self._peer_choice.is_here(request):
            self._scheduler.add(request, now_s)
            return
        self._scheduler.add(request, now_s, remote=True)
        if self._scheduler.awaits_peer(request.request_id):
            self._start(request, now_s)

    def _start(self, request: EngineRequest, now_s: float) -> None:
        held_tokens = self._scheduler.held_tokens(request.request_id)
        # Without a peer this may fail the request at once; its stream opens after `admit`, so the output waits a little.
        peers, later = self._peer_choice.of(request), partial(self._peer_choice.later, request)
        self._early += self._execute(self._handoffs.start(request, held_tokens, peers, now_s, later), now_s)

    def forget(self, request_id: str) -> None:
        """End its hand-off and forget what is known of it."""
        self._execute(self._handoffs.release(request_id), 0.0)  # nothing that it does looks at the time
        self._early = [output for output in self._early if output.request_id != request_id]
        self._provenance.forget(request_id)
        self._hidden.forget(request_id)
        self._self_tests.discard(request_id)

    def start_self_test(self, request: EngineRequest, now_s: float) -> None:
        """Decode a few tokens over empty KV: reservation, admission, decode steps and commit are the real ones."""
        self._scheduler.add(request, now_s, remote=True)
        self._scheduler.peer_ready(request.request_id)
        self._self_tests.add(request.request_id)

    # --- events

    def handle(self, message: Message, now_s: float) -> list[Output]:
        """A message of P, or of a transfer thread."""
        match message:
            case FromPrefill(handoff=handoff, message=Want() | Grant() | Ack() as body):
                return self._execute(self._lending.on_message(handoff, body, now_s), now_s)
            case FromPrefill(handoff=handoff, message=body):
                return self._execute(self._handoffs.on_message(handoff, body, now_s), now_s)
            case PieceArrived(handoff=handoff, ready=ready, piece=piece, seconds=seconds):
                self._transfers.arrived(message)
                actions = self._handoffs.on_arrived(handoff, ready.key, now_s)
                outputs = self._execute(actions, now_s, piece)
                if any(isinstance(action, act.Import) for action in actions):  # else late or duplicate: dropped
                    self._hidden.arrived(handoff.request_id, seconds, now_s)
                return outputs
            case PieceFailed(handoff=handoff, ready=ready, reason=reason):
                if self._handoffs.is_failure(handoff, ready.key, reason, now_s):
                    self._transfers.failed(message)
                return self._execute(self._handoffs.on_failed(handoff, ready.key, reason, now_s), now_s)
            case Published() | PublishFailed():
                return self._execute(self._lending.on_published(message, now_s), now_s)
            case _:
                raise AssertionError(f"a decode engine got {type(message).__name__}")

    def before_step(self, now_s: float) -> list[Output]:
        """Deadlines and stalls of hand-offs."""
        self._handoffs.look(now_s)
        self._recoveries.tick()
        return self._execute([*self._lending.tick(now_s), *self._handoffs.tick(now_s)], now_s)

    def after_step(self, plan: Plan | None, outputs: list[Output], now_s: float) -> list[Output]:
        """Grant credit to what just got pages, restart what was retracted, and sign finished requests."""
        more: list[Output] = []
        for reserved in self._scheduler.take_reserved():
            if reserved.request_id in self._self_tests:
                first = Output(request_id=reserved.request_id, token_ids=(1,))
                more.append(self._scheduler.remote_first_token(reserved.request_id, first))
                self._scheduler.kv_arrived(reserved.request_id)
            else:
                more += self._execute(self._handoffs.on_reserved(reserved.request_id, now_s), now_s)
        while retracted := self._scheduler.take_retracted():
            for request in retracted:
                self._execute(self._handoffs.release(request.request_id), now_s)
                self._hidden.forget(request.request_id)  # its token is computed again, too
                self._start(request, now_s)
        early, self._early = self._early, []
        return [self._provenance.signed(output) for output in early + more + outputs]

    # --- actions

    def _execute(self, actions: Sequence[act.DecodeAction], now_s: float, piece: Piece | None = None) -> list[Output]:
        """`piece`: what has just arrived, for its Import."""
        outputs: list[Output] = []
        for action in actions:
            outputs += map(self._provenance.ended, self._execute_one(action, now_s, piece))
        return outputs

    def _execute_one(self, action: act.DecodeAction, now_s: float, piece: Piece | None) -> list[Output]:
        match action:
            case act.PeerReady(request_id=request_id, is_ready=is_ready):
                self._scheduler.peer_ready(request_id, is_ready)
                if record := self._streams.record(request_id):
                    (record.scheduled if is_ready else record.phases.waits)(now_s)
            case act.OpenStream(handoff=handoff, peer=peer, message=message):
                self._scheduler.peer_ready(handoff.request_id, False)
                if record := self._streams.record(handoff.request_id):
                    record.phases.waits(now_s)
                self._peer_choice.opened(handoff, peer, message.request.num_tokens - message.held_tokens)
                self._peers.open(peer, handoff, self._lending.open(handoff, message))
            case act.Send(handoff=handoff, message=message):
                self._peers.send(handoff, message)
            case act.CloseStream(handoff=handoff):
                self._lending.release(handoff)
                self._peer_choice.closed(handoff)
                self._peers.close(handoff)
            case act.Fetch(handoff=handoff, peer=peer, ready=ready, deadline_s=deadline_s):
                self._fetcher.fetch(handoff, peer, ready, deadline_s)
            case act.CancelFetch(handoff=handoff):
                self._fetcher.cancel(handoff)
            case act.Import(request_id=request_id):
                assert piece is not None, f"request {request_id}: nothing has arrived"
                self._runner.import_tokens(self._scheduler.page_table(request_id), piece)
            case act.Recovered():
                self._recoveries.recovered(action, now_s)
            case act.Hedged():
                self._recoveries.hedged(action)
            case act.FirstToken(request_id=request_id, output=output):
                self._recoveries.served()
                self._peer_choice.computed(request_id)
                self._hidden.computed(request_id, now_s)
                if output.finish is None and (record := self._streams.record(request_id)):
                    record.phases.awaits_kv()
                return [self._scheduler.remote_first_token(request_id, output)]
            case act.NoKV():
                self._recoveries.no_kv(action)
            case act.KVComplete(request_id=request_id, provenance=provenance, brought_by=peer):
                self._recoveries.complete(peer)
                self._provenance.arrived(request_id, provenance)
                self._scheduler.kv_arrived(request_id)
                if record := self._streams.record(request_id):
                    record.phases.kv_arrived(now_s)
            case act.ComputeLocally(request_id=request_id, held_tokens=held_tokens, provenance=provenance):
                self._provenance.arrived(request_id, provenance)
                if record := self._streams.record(request_id):
                    record.phases.kv_given_up(now_s)
                self._scheduler.compute_locally(request_id, held_tokens)
            case act.Fail(request_id=request_id, error=error):
                self._recoveries.failed(request_id, error, now_s)
                failed = self._scheduler.fail(request_id, error)
                return [failed] if failed is not None else []
        return []

    # --- views

    @property
    def is_idle(self) -> bool:
        """No hand-off is alive."""
        return self._handoffs.is_idle and self._lending.is_idle

    def snapshot(self) -> dict[str, Any]:
        """Hand-offs of this worker."""
        return self._handoffs.snapshot() | {
            "peers": self._peers.snapshot(),
            "asked_tokens": self._peer_choice.snapshot(),
            "lending": self._lending.snapshot(),
        }
