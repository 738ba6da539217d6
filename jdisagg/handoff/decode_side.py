"""D's half of the hand-off, for all requests of one decode worker. Events in, actions out; no clock, no thread, no array.

    start        open a stream on the first peer, before memory exists
    on_reserved  pages exist: grant credit, fetch what was announced
    on_message   Accepted, Started, ChunkReady, Done, Refused, StreamEnded of one stream; those of older streams are dropped
    on_arrived   a confirmed piece: Import, Ack, more credit; the last one completes the hand-off
    on_failed    fetch again, then another backend or the range published again, then give the stream up
    tick         deadlines and stalls;  release: the one way out for cancel, retraction and finish

When a stream is lost `Recovery` decides: another P (from where the KV in place ends), a pause, a prefill here, or failure.
Each request ends in exactly one of KVComplete, FirstToken with finish, ComputeLocally, Fail, or a call of `release`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jdisagg.core.config import LocalPrefill, TransferConfig
from jdisagg.core.errors import Overloaded, RequestError, Unavailable
from jdisagg.core.looks import Looks
from jdisagg.core.requests import EngineRequest
from jdisagg.handoff import actions as act
from jdisagg.handoff import messages as msg
from jdisagg.handoff.actions import DecodeAction
from jdisagg.handoff.doubts import Doubts
from jdisagg.handoff.first_token import objection
from jdisagg.handoff.inbound import Inbound
from jdisagg.handoff.inbound_stream import NOT_ACCEPTED, InboundStage, InboundStream
from jdisagg.handoff.ladder import Ladder, PeersNow, is_final, is_unfit
from jdisagg.handoff.live_inbound import LiveInbound
from jdisagg.handoff.messages import HandoffId, PrefillToDecode
from jdisagg.handoff.overdue import forgive, no_piece, unanswered
from jdisagg.handoff.recovery import Recovery
from jdisagg.handoff.refetch import BY_DEADLINE, OUT_OF_TIME, cause_of, is_too_late, next_try


class DecodeSide:
    """Every hand-off of one decode worker. Owned by its engine thread."""

    def __init__(
        self,
        config: TransferConfig,
        *,
        chunk_bytes_per_token: int,
        backend: str,
        num_groups: int = 1,
        head_shards: int = 1,
        vocab_size: int = 2**31,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        """`backend`: used where the two sides do not settle another; `head_shards`: parts in which pieces lie on this mesh."""
        self._config = config
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._live = LiveInbound()
        self._recovery = Recovery(
            config,
            chunk_bytes_per_token=chunk_bytes_per_token,
            backend=backend,
            num_groups=num_groups,
            head_shards=head_shards,
            eos_token_ids=tuple(i for i in eos_token_ids if i < vocab_size),  # P refuses others; they never come
            live=self._live,
        )
        self._doubts = Doubts(self._recovery, config.transfer_chunk_tokens)
        self._looks = Looks()
        self._num_late = 0

    # --- requests

    def start(
        self, request: EngineRequest, held_tokens: int, peers: tuple[str, ...], now_s: float, peers_now: PeersNow = tuple
    ) -> list[DecodeAction]:
        """Begin the hand-off of a request that has none; KV of its first `held_tokens` tokens is in place and pinned.
        `peers_now`: whom to ask later, when `peers` are full or lost."""
        request_id = request.request_id
        assert 0 <= held_tokens <= request.num_tokens, f"request {request_id}: held_tokens is {held_tokens}"
        record = Inbound(request, held_tokens, Ladder(peers, peers_now))
        self._live.add(record)
        return self._recovery.begin(record, now_s)

    def on_reserved(self, request_id: str, now_s: float) -> list[DecodeAction]:
        """The request has pages for all its tokens."""
        record = self._live.get(request_id)
        if record is None or record.reserved:
            return []
        self._live.reserve(record)
        if record.stream is None:
            return []
        record.stream.progress_s = now_s
        if record.doubted is not None:
            record.doubted.stream.progress_s = now_s  # it could send nothing before
        return record.ask(now_s) + self._complete(record)

    def release(self, request_id: str) -> list[DecodeAction]:
        """End the hand-off, whatever its stage; unknown ids are ignored."""
        record = self._live.get(request_id)
        return [] if record is None else self._recovery.end(record)

    # --- messages of P

    def on_message(self, handoff: HandoffId, message: PrefillToDecode, now_s: float) -> list[DecodeAction]:
        """A message of the stream `handoff`; one of an older stream or an ended hand-off changes nothing."""
        if isinstance(message, msg.Lives):
            if (live := self._live.get(handoff.request_id)) is not None:
                live.ladder.lives(message.peer)
            return []
        if (found := self._live.find(handoff)) is None:
            return [] if isinstance(message, msg.StreamEnded | msg.Quiet | msg.Awake) else self._late()
        record, stream = found
        if (doubted := record.doubt_about(stream)) is not None:
            actions, is_back = self._doubts.on_message(record, doubted, message, now_s)
            return actions + (self._on_stream(record, stream, message, now_s) if is_back else [])
        stream.silent_s = message.seconds if isinstance(message, msg.Quiet) else 0.0
        if isinstance(message, msg.Quiet):
            self._live.note_quiet(record)
            return self._recovery.doubt(record, message.seconds, now_s)
        if isinstance(message, msg.Awake):
            return []  # a heartbeat is no progress
        stream.progress_s = now_s
        ahead = record.doubted is not None and record.doubted.is_behind(message)
        moved = self._recovery.move_on(record, now_s) if ahead else []
        return moved + self._on_stream(record, stream, message, now_s)

    def _on_stream(self, record: Inbound, stream: InboundStream, message: PrefillToDecode, now_s: float) -> list[DecodeAction]:
        stage = stream.stage
        match message:
            case msg.Agreed(backends=backends) if stage in NOT_ACCEPTED:
                stream.backends = backends
                return self._recovery.asked(record, stream)
            case msg.Accepted(cached_tokens=cached_tokens) if stage in NOT_ACCEPTED:
                stream.move(InboundStage.ACCEPTED)
                stream.cached_tokens = cached_tokens
                return []
            case msg.Started() if stage not in NOT_ACCEPTED:
                stream.has_started = True
                return [act.PeerReady(record.request.request_id), *self._recovery.place_free(stream.peer, now_s)]
            case msg.Parked() if stage is InboundStage.COMPUTED:
                stream.is_parked = True
                return []
            case msg.ChunkReady() if stage not in NOT_ACCEPTED:
                return self._on_chunk(record, stream, message, now_s)
            case msg.Done() if stage in (InboundStage.ACCEPTED, InboundStage.TRANSFERRING):
                return self._on_done(record, stream, message, now_s)
            case msg.Refused(error=error):
                return self._on_refused(record, error, now_s)
            case msg.StreamEnded():
                return self._on_ended(record, stream, message, now_s)
            case _:
                return self._recovery.lose(record, f"protocol: {type(message).__name__} at stage {stage.value}", now_s)

    def _on_chunk(self, record: Inbound, stream: InboundStream, ready: msg.ChunkReady, now_s: float) -> list[DecodeAction]:
        if ready.key in stream.pieces:
            return self._late()
        if complaint := record.complaint(stream, ready, self._config.transfer_chunk_tokens):
            return self._recovery.lose(record, f"protocol: {complaint}", now_s)
        if stream.stage is InboundStage.ACCEPTED:
            stream.move(InboundStage.TRANSFERRING)
        stream.is_parked = False
        piece = stream.announce(ready)
        return [stream.fetch(piece, record.request.deadline_s, now_s)] if record.reserved else []

    def _on_done(self, record: Inbound, stream: InboundStream, message: msg.Done, now_s: float) -> list[DecodeAction]:
        request = record.request
        first = replace(message.first, request_id=request.request_id, attempt=request.attempt)
        if first.error is not None:
            return self._on_error(record, first.error, f"failed: {first.error}", now_s)
        if record.first is None and (wrong := objection(first, request, self._vocab_size, self._eos)):
            return self._recovery.lose(record, f"protocol: Done {wrong}", now_s)
        stream.move(InboundStage.COMPUTED)
        record.computed_by(first.provenance)
        if record.first is not None:
            return self._complete(record)  # the token was delivered by an earlier stream
        record.first = first
        if first.finish is not None:
            first = replace(first, provenance=record.signed(first.provenance))
            return [act.FirstToken(request.request_id, first), *self.release(request.request_id)]
        return [act.FirstToken(request.request_id, first), *self._complete(record)]

    def _on_ended(self, record: Inbound, stream: InboundStream, message: msg.StreamEnded, now_s: float) -> list[DecodeAction]:
        if stream.stage is InboundStage.COMPUTED and record.covered:
            return []  # P owes nothing more, only pages are missing here
        if message.reason == "deadline":
            return self._recovery.fail(record, record.too_late())
        record.ended(stream, message)
        cause = message.reason if message.error is None else f"{message.reason}: {message.error}"
        return self._on_error(record, message.error, cause, now_s)

    def _on_refused(self, record: Inbound, error: RequestError, now_s: float) -> list[DecodeAction]:
        if self._config.local_prefill is LocalPrefill.NEVER and isinstance(error, Unavailable) and not is_unfit(error):
            return self._recovery.pass_over(record, now_s, "draining")  # another one may come in its place
        return self._on_error(record, error, f"refused: {error}", now_s)

    def _on_error(self, record: Inbound, error: RequestError | None, cause: str, now_s: float) -> list[DecodeAction]:
        if error is not None and is_final(error):
            return self._recovery.fail(record, error)
        if isinstance(error, Overloaded):
            return self._recovery.pass_over(record, now_s, told_s=error.retry_after_s)
        return self._recovery.lose(record, cause, now_s, error)

    # --- pieces

    def on_arrived(self, handoff: HandoffId, key: str, now_s: float) -> list[DecodeAction]:
        """The piece is whole and on the device; late and duplicate ones give no Import and must be dropped."""
        if (found := self._live.find(handoff, key)) is None:
            return self._late()
        record, stream = found
        ready = stream.settle(key)
        stream.progress_s = now_s
        stream.line.arrived(ready, now_s)
        record.take(ready, stream.peer)
        actions: list[DecodeAction] = [act.Import(handoff.request_id, handoff, key), act.Send(handoff, msg.Ack(key=key))]
        doubted = record.doubt_about(stream)
        more = record.grant() if doubted is None else self._doubts.on_arrived(record, doubted, now_s)
        return actions + more + self._complete(record)

    def is_failure(self, handoff: HandoffId, key: str, reason: str, now_s: float) -> bool:
        """Whether it is one of the transfer that the piece did not arrive; else its request's time is over, or nobody waits for
        it any more. To be asked before `on_failed`."""
        if reason not in BY_DEADLINE:
            return True
        found = self._live.find(handoff, key)
        return found is not None and not is_too_late(found[0], found[1].pieces[key], reason, now_s)

    def on_failed(self, handoff: HandoffId, key: str, reason: str, now_s: float) -> list[DecodeAction]:
        """The piece did not arrive: the same key once more, then another backend or a new key from P, then another stream;
        nothing any more for a request whose time is over."""
        if (found := self._live.find(handoff, key)) is None:
            return self._late()
        record, stream = found
        piece = stream.pieces[key]
        if reason == "stalled" or piece.fetch_deadline_s != record.request.deadline_s:  # else the request had too little time
            stream.line.failed(piece, reason)
        if is_too_late(record, piece, reason, now_s):
            return self._recovery.fail(record, record.too_late())
        if (doubted := record.doubt_about(stream)) is not None:
            return self._doubts.on_failed(record, doubted, piece, reason, now_s)
        if (actions := next_try(record, stream, piece, reason, now_s)) is None:
            return self._recovery.lose(record, cause_of(piece, reason), now_s, no_kv=reason in OUT_OF_TIME)
        return actions

    def _complete(self, record: Inbound) -> list[DecodeAction]:
        stream = record.stream
        if stream is None or stream.stage is not InboundStage.COMPUTED or not record.reserved or not record.covered:
            return []
        request_id = record.request.request_id
        complete = act.KVComplete(request_id, record.provenance(), record.arrived.prefill_worker)
        return [complete, *self.release(request_id)]

    # --- time

    def look(self, now_s: float) -> None:
        """The engine turns over, and has heard what there was to hear; before `tick`."""
        if still_s := self._looks.stood_still_s(now_s):
            forgive(self._live.all(), still_s, now_s)

    def tick(self, now_s: float) -> list[DecodeAction]:
        """Deadlines of requests, answers and fetches; streams that stand still; pauses that are over."""
        actions: list[DecodeAction] = []
        for record in self._live.due(now_s):
            if now_s >= record.request.deadline_s:
                actions += self._recovery.fail(record, record.too_late())
            elif record.stream is not None:
                actions += self._tick_stream(record, record.stream, now_s)
            elif now_s >= record.retry_at_s:
                actions += self._recovery.resume(record, now_s)
            if self._live.get(record.request.request_id) is record:
                self._live.watch(record)
        return actions + self._recovery.doubt_more(now_s)

    def _tick_stream(self, record: Inbound, stream: InboundStream, now_s: float) -> list[DecodeAction]:
        if cause := unanswered(stream, now_s):
            return self._recovery.lose(record, cause, now_s)
        if moved_on := self._recovery.late(record, now_s):
            return moved_on
        actions: list[DecodeAction] = []
        for key in stream.overdue(now_s):
            actions += self.on_failed(stream.handoff, key, "timeout", now_s)
        if cause := no_piece(record, stream, self._config.lease_s, now_s):
            actions += self._recovery.lose(record, cause, now_s)
        return actions

    def _late(self) -> list[DecodeAction]:
        self._num_late += 1
        return []

    # --- views

    @property
    def is_idle(self) -> bool:
        """No hand-off is alive."""
        return not self._live

    def snapshot(self) -> dict[str, Any]:
        """Live hand-offs as JSON-able data; `late` counts messages and pieces that came for streams which were gone."""
        handoffs = {record.request.request_id: record.summary() for record in self._live.all()}
        return {"handoffs": handoffs, "late": self._num_late}
