"""P's half of the hand-off, for all streams that decode workers opened here. Events in, actions out; no clock, no thread.

    open              Admit the request under an id of its own
    on_computed       KV of [0, upto) is dispatched: cut finished chunks within credit and buffer budget
    on_first_token    Done, whatever is still to be sent
    on_published      tell D; Ack discards; the last Ack after Done releases the request's pages
    to_park           others wait for pages that computed prompts hold whose D has none yet
    release           the one way out: stream end, deadline, silence of D, failure, completion

What is published when is `ExportQueue`'s part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import DeadlineExceeded, HandoffLost, InvalidRequest, RequestError
from jdisagg.core.requests import Output
from jdisagg.handoff import actions as act
from jdisagg.handoff.actions import PrefillAction
from jdisagg.handoff.exports import ExportQueue, unguessable_key
from jdisagg.handoff.full_pool import FullPool
from jdisagg.handoff.live_outbound import LiveOutbound
from jdisagg.handoff.messages import (
    Accepted,
    Ack,
    ChunkReady,
    Declined,
    DecodeToPrefill,
    Done,
    Grant,
    HandoffId,
    Open,
    Parked,
    Refused,
    Started,
    StreamEnded,
    Want,
)
from jdisagg.handoff.outbound import MOST_AGAIN, Outbound, OutboundStage
from jdisagg.handoff.standstill import Standstill

MAX_PUBLISH_FAILURES = 2  # per hand-off


class PrefillSide:
    """Every hand-off of one prefill worker. Owned by its engine thread. `new_key` makes unguessable, unique keys."""

    def __init__(self, config: TransferConfig, *, bytes_per_token: int, new_key: Callable[[], str] = unguessable_key) -> None:
        self._config = config
        self._exports = ExportQueue(config, bytes_per_token=bytes_per_token, new_key=new_key)
        self._standstill = Standstill(config)
        self._full_pool = FullPool()
        self._live = LiveOutbound()
        self._num_late = 0

    # --- streams

    def open(self, handoff: HandoffId, message: Open, now_s: float, receiver: str = "") -> list[PrefillAction]:
        """A D, `receiver`, opened the stream `handoff`, an id no other stream of this P has had."""
        assert self._live.get(handoff) is None, f"hand-off {handoff} is open already"
        request = message.request
        if not 0 <= message.held_tokens <= request.num_tokens:
            error = InvalidRequest(
                f"request {request.request_id}: held_tokens is {message.held_tokens}, wanted 0 to {request.num_tokens}"
            )
            return [act.Reply(handoff, Refused(error=error)), act.CloseReply(handoff)]
        chunk_tokens = min(self._config.transfer_chunk_tokens, message.max_piece_tokens or self._config.transfer_chunk_tokens)
        record = Outbound(handoff, request, message.held_tokens, now_s, chunk_tokens, receiver, cut=message.held_tokens)
        self._live.add(record)
        request = replace(request, request_id=record.engine_request_id, fork_group="")
        return [act.Admit(handoff, request, message.held_tokens, message.lending, message.goes_on)]

    def on_admitted(self, handoff: HandoffId, cached_tokens: int) -> list[PrefillAction]:
        """The scheduler queued it; `cached_tokens` of it are in the prefix cache."""
        record = self._live.get(handoff)
        if record is None:
            return self._late()
        record.move(OutboundStage.COMPUTING)
        return [act.Reply(handoff, Accepted(cached_tokens=cached_tokens))]

    def on_refused(self, handoff: HandoffId, error: RequestError) -> list[PrefillAction]:
        """The scheduler did not take it."""
        record = self._live.get(handoff)
        return self._late() if record is None else self._refuse(record, error, engine_has_it=False)

    def on_message(self, handoff: HandoffId, message: DecodeToPrefill, now_s: float) -> list[PrefillAction]:
        """A message of D on an open stream; one for a stream that is gone changes nothing."""
        record = self._live.get(handoff)
        if record is None:
            return [] if isinstance(message, StreamEnded) else self._late()
        record.heard_s = now_s
        self._standstill.moved(record.receiver, now_s)
        match message:
            case Grant(credit_bytes=credit_bytes):
                record.credit_bytes = max(record.credit_bytes, credit_bytes)
                self._live.begin(record)
                return self._unpark(record) + self._exports.pump(record)
            case Ack(key=key):
                return self._exports.discard(record, key) + self._exports.pump() + self._release_delivered(record)
            case Want(begin=begin, end=end) if record.stage is not OutboundStage.ENDED:
                return self._on_want(record, begin, end)
            case ChunkReady() | Declined() | Want():
                return []  # the borrower's; or D is about to read that it needs nothing any more
            case StreamEnded():
                return self.release(handoff)
            case Open():
                error = InvalidRequest(f"request {record.request.request_id}: Open twice on one stream")
                return self._refuse(record, error)

    def on_heartbeat(self, handoff: HandoffId, now_s: float) -> None:
        """D is alive: its leases run from now on."""
        if record := self._live.get(handoff):
            record.heard_s = now_s

    def release(self, handoff: HandoffId) -> list[PrefillAction]:
        """End the hand-off, whatever its stage; unknown ones are ignored."""
        record = self._live.take(handoff)
        if record is None:
            return []
        pieces = self._exports.remove(record)
        return [*pieces, act.ReleaseRequest(record.engine_request_id), act.CloseReply(handoff), *self._exports.pump()]

    # --- the engine

    def owns(self, engine_request_id: str) -> bool:
        """Whether the engine request belongs to a live hand-off."""
        return self._live.of(engine_request_id) is not None

    def on_started(self, engine_request_id: str) -> list[PrefillAction]:
        """The engine has given the request its pages and begins with it."""
        record = self._live.of(engine_request_id)
        if record is None or record.stage is OutboundStage.COMPUTED:
            return []
        return [act.Reply(record.handoff, Started())]

    def on_computed(self, engine_request_id: str, upto: int) -> list[PrefillAction]:
        """KV of tokens [0, upto) is dispatched; an Export that follows is ordered after it on the device."""
        record = self._live.of(engine_request_id)
        if record is None:
            return []
        record.computed = max(record.computed, upto)
        return [*self._exports.pump(record)]

    def on_first_token(self, engine_request_id: str, output: Output) -> list[PrefillAction]:
        """The prompt is computed and `output` carries the token; with `finish` set D needs no KV at all."""
        record = self._live.of(engine_request_id)
        if record is None:
            return self._late()
        if record.stage is OutboundStage.COMPUTED:  # once more, after it was parked; D has its token
            record.computed = max(record.computed, record.total)
            return [*self._exports.pump(record)]
        self._live.begin(record)
        first = replace(output, request_id=record.request.request_id, attempt=record.request.attempt)
        if first.finish is None:
            record.move(OutboundStage.COMPUTED)
            record.computed = max(record.computed, record.total)
        else:
            record.end()
        done = act.Reply(record.handoff, Done(first=first, num_chunks=record.num_chunks))
        rest = self._exports.pump(record) if first.finish is None else self._exports.end(record)
        return [done, *rest, *self._release_delivered(record)]

    def on_failed_requests(self, errors: Mapping[str, RequestError]) -> list[PrefillAction]:
        """The engine gave these up, and their pages: what one of them leaves of the buffer is for none of the others."""
        records = [self._live.the_one_of(engine_request_id) for engine_request_id in errors]
        for record in records:
            self._exports.withdraw(record)
        return [action for record in records for action in self._refuse(record, errors[record.engine_request_id])]

    # --- the transfer

    def on_published(
        self, handoff: HandoffId, ready: ChunkReady, now_s: float, *, stays_tokens: int = 0
    ) -> list[PrefillAction]:
        """The piece can be fetched; as many as `stays_tokens` lie on the device until it is discarded."""
        record = self._live.get(handoff)
        piece = None if record is None else record.pieces.get(ready.key)
        if record is None or piece is None:
            return [*self._late(), act.Discard(ready.key)]
        if piece.published:
            return self._late()
        record.heard_s = max(record.heard_s, now_s)
        return [act.Reply(handoff, ready), *self._exports.published(record, piece, stays_tokens=stays_tokens)]

    def on_publish_failed(self, handoff: HandoffId, key: str, reason: str, *, has_moved: bool = False) -> list[PrefillAction]:
        """The piece never became fetchable: once more, and the hand-off is refused after some. `has_moved`: its pieces go over
        another backend now, which is not to be blamed for those that were under way."""
        record = self._live.get(handoff)
        piece = None if record is None else record.pieces.get(key)
        if record is None or piece is None:
            return self._late()
        begin, end = piece.begin, piece.end
        record.num_failures += not has_moved
        record.spent_bytes -= piece.num_bytes  # D never heard of it
        record.num_cut -= 1
        actions = self._exports.discard(record, key)
        if record.num_failures > MAX_PUBLISH_FAILURES:
            error = HandoffLost(f"request {record.request.request_id}: publishing [{begin}, {end}) failed: {reason}")
            return actions + self._refuse(record, error)
        record.again.append((begin, end))
        return [*actions, *self._exports.pump(record)]

    # --- time

    def tick(self, now_s: float) -> list[PrefillAction]:
        """Deadlines; leases: a D silent for `lease_s` loses published pieces; one that takes none, once others need room."""
        self._standstill.look(self._live.all(), now_s)
        actions: list[PrefillAction] = []
        for record in self._live.take_too_late(now_s):
            where = f"at stage {record.stage.value}, {record.computed} of {record.request.num_tokens} tokens computed"
            text = f"request {record.request.request_id}: deadline passed on the prefill side {where}"
            actions += self._refuse(record, DeadlineExceeded(text))
        for record in list(self._live.begun()):
            silent_s = now_s - record.heard_s
            if silent_s >= self._config.lease_s and any(piece.published for piece in record.pieces.values()):
                text = f"request {record.request.request_id}: published pieces not fetched for {silent_s:.1f} s"
                actions += self._refuse(record, HandoffLost(text))
        for record, still_s in self._standstill.find(self._live.begun(), self._exports.others_wait, now_s):
            text = f"published pieces not fetched for {still_s:.1f} s, and others need their room"
            actions += self._refuse(record, HandoffLost(f"request {record.request.request_id}: {text}"))
        return actions

    # --- pages for others

    def to_park(self, counts: Mapping[str, int], now_s: float) -> tuple[str, ...]:
        """As FullPool. Without this two full pools could wait for each other, or one D for another one's memory."""
        return self._full_pool.to_park(self._live, counts, now_s)

    def on_parked(self, engine_request_id: str) -> list[PrefillAction]:
        """Its pages went to others: its prompt is computed again once its D has pages for it, never before."""
        record = self._live.the_one_of(engine_request_id)
        record.park()
        return [act.Reply(record.handoff, Parked())]

    # --- helpers

    def _on_want(self, record: Outbound, begin: int, end: int) -> list[PrefillAction]:
        size = end - begin
        if not (record.held_tokens <= begin < end <= record.cut and size <= record.chunk_tokens):
            text = f"Want [{begin}, {end}): only published tokens, [{record.held_tokens}, {record.cut}), can be sent again"
            return self._refuse(record, InvalidRequest(f"request {record.request.request_id}: {text}"))
        if record.is_worn_out:
            text = f"Want [{begin}, {end}): each piece was sent again {MOST_AGAIN} times, on average"
            return self._refuse(record, HandoffLost(f"request {record.request.request_id}: {text}"))
        key = record.key_of(begin, end)
        actions = [] if key is None else self._exports.discard(record, key)
        record.again.append((begin, end))
        return [*actions, *self._exports.pump(record)]

    def _unpark(self, record: Outbound) -> list[PrefillAction]:
        if record.stage is not OutboundStage.PARKED or not record.credit_bytes:  # a Grant of nothing shows no pages
            return []
        record.move(OutboundStage.COMPUTED)
        return [act.Unpark(record.engine_request_id)]

    def _release_delivered(self, record: Outbound) -> list[PrefillAction]:
        return self.release(record.handoff) if record.delivered else []

    def _refuse(self, record: Outbound, error: RequestError, *, engine_has_it: bool = True) -> list[PrefillAction]:
        actions = self.release(record.handoff)
        if not engine_has_it:
            actions.remove(act.ReleaseRequest(record.engine_request_id))
        return [act.Reply(record.handoff, Refused(error=error)), *actions]

    def _late(self) -> list[PrefillAction]:
        self._num_late += 1
        return []

    # --- views

    @property
    def is_idle(self) -> bool:
        """No hand-off is alive and nothing is published."""
        assert self._live or not self._exports.buffered_bytes, f"idle with {self._exports.buffered_bytes} published bytes"
        return not self._live

    @property
    def num_live(self) -> int:
        """Hand-offs, at any stage."""
        return len(self._live)

    def snapshot(self) -> dict[str, Any]:
        """Live hand-offs as JSON-able data; `late` counts events that came for streams which were gone."""
        handoffs = {record.engine_request_id: record.summary() for record in self._live.all()}
        return {"handoffs": handoffs, "published_bytes": self._exports.buffered_bytes, "late": self._num_late}
