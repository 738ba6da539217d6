"""The prefill role: computes prompts for decode workers and publishes their KV.

    D opens a stream      -> PrefillSide.open -> admitted to the scheduler under an id of its own
    a chunk is dispatched -> its finished pieces are gathered (device order puts the gather after the chunk) and published
    first token sampled   -> Done
    the stream ends       -> ONE release: pieces discarded, pages to the prefix cache

`PrefillSide` (handoff) decides, this class executes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from jdisagg.core.errors import Overloaded, RequestError, Unavailable
from jdisagg.core.metrics import Metrics
from jdisagg.core.record import RequestRecord
from jdisagg.core.requests import EngineRequest, FinishReason, Output, Provenance
from jdisagg.handoff import actions as act
from jdisagg.handoff.events import PeerAlive, PeerMessage, PeerOpened
from jdisagg.handoff.messages import ChunkReady, Declined, HandoffId, Refused, Want
from jdisagg.handoff.prefill_side import PrefillSide
from jdisagg.roles.gauge_share import GaugeShare
from jdisagg.roles.inbox import Message
from jdisagg.roles.kv_borrowing import KVBorrowing
from jdisagg.roles.ports import Runner
from jdisagg.roles.queue_shares import QueueShares
from jdisagg.sched.plan import Plan
from jdisagg.sched.scheduler import Scheduler
from jdisagg.transfer.base import PieceArrived, PieceFailed, Published, PublishFailed
from jdisagg.transfer.choice import PublisherSet

log = logging.getLogger(__name__)


class PrefillRole:
    """An EngineRole that executes what PrefillSide decides."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        handoffs: PrefillSide,
        runner: Runner,
        publishers: PublisherSet,
        metrics: Metrics,
        worker: str,
        borrowing: KVBorrowing,
        slow_request_s: float = inf,
        lives: Metrics | None = None,
    ) -> None:
        """`slow_request_s`: prompts whose hand-off takes longer in all are logged with their life. `lives`: what the phases of
        prompts are observed into, if not `metrics`."""
        self._scheduler = scheduler
        self._handoffs = handoffs
        self._runner = runner
        self._publishers = publishers
        self._metrics = metrics
        self._published_bytes, self._leases = GaugeShare(metrics.transfer.published_bytes), GaugeShare(metrics.transfer.leases)
        self._worker = worker
        self._borrowing = borrowing
        self._record = partial(RequestRecord, metrics if lives is None else lives, slow_s=slow_request_s)
        self._records: dict[str, RequestRecord] = {}  # of live hand-offs, by engine request id
        self._num_computed = Counter[str]()  # tokens in steps so far, by engine request id, until the hand-off is over
        self._opened: dict[HandoffId, PeerOpened] = {}  # live hand-offs, as their D opened them
        self._shares = QueueShares()

    def admit(self, request: EngineRequest, now_s: float) -> None:
        """Only the self-test comes this way: a prompt whose KV nobody fetches."""
        self._scheduler.add(request, now_s)

    def start_self_test(self, request: EngineRequest, now_s: float) -> None:
        """Prefill one prompt; its pages are released with the first token."""
        self.admit(request, now_s)

    # --- events

    def handle(self, message: Message, now_s: float) -> list[Output]:
        """A message of D, or of a transfer thread."""
        match message:
            case PeerOpened():
                self._open(message, now_s)
            case PeerMessage(handoff=handoff, message=body):
                if isinstance(body, Want) and body.backend:
                    self._publishers.prefer(handoff, body.backend)
                self._execute(self._handoffs.on_message(handoff, body, now_s), now_s)
                if isinstance(body, ChunkReady | Declined):
                    self._execute(self._borrowing.on_message(handoff, body, now_s), now_s)
            case PeerAlive(handoff=handoff):
                self._handoffs.on_heartbeat(handoff, now_s)
            case PieceArrived() | PieceFailed():
                self._execute(self._borrowing.on_fetched(message, now_s), now_s)
            case Published(handoff=handoff, ready=ready, stays_tokens=stays_tokens):
                self._execute(self._handoffs.on_published(handoff, ready, now_s, stays_tokens=stays_tokens), now_s)
            case PublishFailed(handoff=handoff, key=key, reason=reason, backend=backend):
                self._metrics.transfer.failures.labels(backend=backend, reason="publish").inc()
                self._change_backend(message)
                has_moved = not self._publishers.is_on(handoff, backend)
                self._execute(self._handoffs.on_publish_failed(handoff, key, reason, has_moved=has_moved), now_s)
            case _:
                raise AssertionError(f"a prefill engine got {type(message).__name__}")
        return []

    def _open(self, opened: PeerOpened, now_s: float) -> None:
        handoff, opening = opened.handoff, opened.message
        backends = opening.backends or ((opening.backend,) if opening.backend else ())
        if not self._publishers.open(handoff, backends):
            wanted, got = ", ".join(self._publishers.names), ", ".join(backends)
            text = f"transfer backend: wanted one of {wanted}, got {got}; see --kv-transfer-backend"
            error = Unavailable(text, field="kv_transfer_backend")
            opened.reply.send(Refused(error=error))
            opened.reply.close()
            return
        self._opened[handoff] = opened
        self._execute(self._handoffs.open(handoff, opening, now_s, opened.peer), now_s)

    def _change_backend(self, failed: PublishFailed) -> None:
        """The hand-off goes on over the next backend that both sides have, if there is one."""
        if other := self._publishers.move_off(failed.handoff, failed.backend):
            self._metrics.fleet.recoveries.labels(rung="other_backend").inc()
            log.warning(
                "request %s: recovering by other_backend; stage publishing [%d, %d) over %s: %s; going on over %s",
                *(failed.handoff.request_id, failed.begin, failed.end, failed.backend, failed.reason, other),
            )

    def before_step(self, now_s: float) -> list[Output]:
        """Deadlines and leases."""
        self._execute(self._handoffs.tick(now_s), now_s)
        self._execute(self._borrowing.tick(now_s), now_s)
        self._make_room(now_s)
        self._published_bytes.show(self._publishers.num_buffered_bytes)
        self._leases.show(self._handoffs.num_live)
        return []

    def _make_room(self, now_s: float) -> None:
        """When a whole step could start nobody, computed prompts whose D has no pages stand back, one per tick."""
        parkable = self._handoffs.to_park(self._scheduler.counts(), now_s)
        parked = self._scheduler.park(parkable) if parkable else None
        if parked is not None:
            log.info("request %s: gave its pages to waiting prompts, its receiver has none yet", parked)
            if record := self._records.get(parked):
                record.parked(now_s)
            self._execute(self._handoffs.on_parked(parked), now_s)

    def after_step(self, plan: Plan | None, outputs: list[Output], now_s: float) -> list[Output]:
        """Publish what the dispatched chunks made, and answer first tokens; failures come first, their pages are gone."""
        failed = {o.request_id: o.error for o in outputs if o.error is not None and self._handoffs.owns(o.request_id)}
        self._execute(self._handoffs.on_failed_requests(failed), now_s)
        self._execute(self._borrowing.planned(now_s), now_s)
        if plan is not None:
            self._dispatched(plan, now_s)
        own: list[Output] = []
        for output in outputs:
            if output.request_id in failed:
                continue
            if self._handoffs.owns(output.request_id):
                self._sampled(output, now_s)
            else:
                own.append(self._ended(output))
        return own

    def _dispatched(self, plan: Plan, now_s: float) -> None:
        for admit in plan.admit:
            if record := self._records.get(admit.request_id):
                record.scheduled(now_s)
            self._execute(self._handoffs.on_started(admit.request_id), now_s)
        for chunk in plan.prefill:
            if self._handoffs.owns(chunk.request_id):  # else it has failed just now
                self._num_computed[chunk.request_id] += len(chunk.token_ids)
            upto = chunk.start + len(chunk.token_ids)
            self._execute(self._handoffs.on_computed(chunk.request_id, upto), now_s)

    def _sampled(self, output: Output, now_s: float) -> None:
        if output.token_ids and (record := self._records.get(output.request_id)):
            record.produced(now_s)
        num_computed = self._num_computed[output.request_id]
        provenance = Provenance(prefill_worker=self._worker, prefilled_tokens=num_computed)
        signed = replace(output, provenance=self._borrowing.sign(output.request_id, provenance))
        self._execute(self._handoffs.on_first_token(output.request_id, signed), now_s)

    def _ended(self, output: Output) -> Output:
        """A self-test: there is no D to close the stream, so its first token ends it."""
        self._scheduler.cancel(output.request_id)
        if output.finish is not None:
            return output
        return Output(request_id=output.request_id, token_ids=output.token_ids, finish=FinishReason.LENGTH)

    def forget(self, request_id: str) -> None:
        """Self-tests hold nothing outside the scheduler."""

    # --- actions

    def _execute(self, actions: Sequence[act.PrefillAction], now_s: float) -> None:
        for action in actions:
            match action:
                case act.Admit():
                    self._admit(action, now_s)
                case act.Unpark(engine_request_id=request_id):
                    self._scheduler.unpark(request_id)
                case act.Reply(handoff=handoff, message=message):
                    if opened := self._opened.get(handoff):
                        opened.reply.send(message)
                case act.CloseReply(handoff=handoff):
                    self._publishers.forget(handoff)
                    if opened := self._opened.pop(handoff, None):
                        opened.reply.close()
                case act.Export(handoff=handoff, engine_request_id=request_id, begin=begin, end=end, key=key):
                    piece = self._runner.export_tokens(self._scheduler.page_table(request_id), begin, end)
                    opened = self._opened[handoff]
                    piece = replace(piece, receiver=opened.peer, head_shards=opened.message.head_shards)
                    self._publishers.publish(handoff, key, piece)
                case act.Discard(key=key):
                    self._publishers.discard(key)
                case act.ReleaseRequest(engine_request_id=request_id):
                    self._shares.closed(request_id)
                    self._borrowing.release(request_id)
                    self._scheduler.cancel(request_id)
                    self._num_computed.pop(request_id, None)
                    if record := self._records.pop(request_id, None):
                        record.handed_over(now_s)

    def _admit(self, admit: act.Admit, now_s: float) -> None:
        handoff, request = admit.handoff, admit.request
        receiver = self._opened[handoff].peer
        try:
            self._scheduler.add(request, now_s, goes_on=admit.goes_on, kept=self._shares.num_kept(receiver, now_s))
        except RequestError as error:
            if isinstance(error, Overloaded):
                self._shares.refused(receiver, now_s)
            self._execute(self._handoffs.on_refused(handoff, error), now_s)
            return
        self._shares.opened(request.request_id, receiver)
        self._borrowing.consider(admit, now_s)
        self._records[request.request_id] = self._record(request, now_s)
        cached_tokens = self._scheduler.held_tokens(request.request_id)
        self._execute(self._handoffs.on_admitted(handoff, cached_tokens), now_s)

    # --- views

    @property
    def is_idle(self) -> bool:
        """No hand-off is alive."""
        return self._handoffs.is_idle and self._borrowing.is_idle

    @property
    def num_guests(self) -> int:
        """Hand-offs, parked ones included."""
        return len(self._opened)

    def snapshot(self) -> dict[str, Any]:
        """Hand-offs and published bytes of this worker."""
        return {
            **self._handoffs.snapshot(),
            "buffered_bytes": self._publishers.num_buffered_bytes,
            "replies": len(self._opened),
            "borrowing": self._borrowing.snapshot(),
            "requests": {request_id: record.snapshot() for request_id, record in self._records.items()},
        }
