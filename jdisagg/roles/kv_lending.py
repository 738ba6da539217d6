"""The decode role's part that publishes KV for prefill workers which would compute it anew: what `Lender` decides, executed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jdisagg.core.metrics import Metrics
from jdisagg.handoff import actions as act
from jdisagg.handoff.lender import Lender, LenderAction
from jdisagg.handoff.messages import Ack, Grant, HandoffId, Lending, Open, Want
from jdisagg.roles.gauge_share import GaugeShare
from jdisagg.roles.ports import Runner
from jdisagg.sched.scheduler import Scheduler
from jdisagg.transfer.base import Published, Publisher, PublishFailed

log = logging.getLogger(__name__)


class KVLending:
    """Owned by the engine thread of a decode worker. What it returns is for the role to send."""

    def __init__(
        self,
        lender: Lender,
        offer: Lending,
        *,
        scheduler: Scheduler,
        runner: Runner,
        publisher: Publisher,
        metrics: Metrics,
    ) -> None:
        """`offer`: where and how a prefill worker gets the pieces."""
        self._lender = lender
        self._offer = offer
        self._scheduler = scheduler
        self._runner = runner
        self._publisher = publisher
        self._metrics = metrics
        self._published_bytes, self._leases = GaugeShare(metrics.transfer.published_bytes), GaugeShare(metrics.transfer.leases)

    # --- streams

    def open(self, handoff: HandoffId, message: Open) -> Open:
        """A stream begins: `message` with the offer to lend what is held here, if anything is."""
        if not message.held_tokens:
            return message
        self._lender.open(handoff, message.held_tokens)
        return replace(message, lending=self._offer)

    def release(self, handoff: HandoffId) -> None:
        """The stream is over; idempotent."""
        self._execute(self._lender.release(handoff))

    # --- events

    def on_message(self, handoff: HandoffId, message: Want | Grant | Ack, now_s: float) -> list[act.Send]:
        """P wants something, or got it."""
        return self._execute(self._lender.on_message(handoff, message, now_s))

    def on_published(self, event: Published | PublishFailed, now_s: float) -> list[act.Send]:
        """A transfer thread is through with a piece."""
        if isinstance(event, Published):
            return self._execute(self._lender.on_published(event.handoff, event.ready, now_s, stays_tokens=event.stays_tokens))
        self._metrics.transfer.failures.labels(backend=self._publisher.name, reason="publish").inc()
        log.warning("request %s: publishing lent KV failed: %s", event.handoff.request_id, event.reason)
        return self._execute(self._lender.on_publish_failed(event.handoff, event.key, event.reason))

    def tick(self, now_s: float) -> list[act.Send]:
        """Leases."""
        sends = self._execute(self._lender.tick(now_s))
        self._published_bytes.show(self._publisher.num_buffered_bytes)
        self._leases.show(self._lender.num_loans)
        return sends

    # --- actions

    def _execute(self, actions: Sequence[LenderAction]) -> list[act.Send]:
        sends: list[act.Send] = []
        for action in actions:
            match action:
                case act.Send():
                    sends.append(action)
                case act.Export(handoff=handoff, engine_request_id=request_id, begin=begin, end=end, key=key):
                    piece = self._runner.export_tokens(self._scheduler.page_table(request_id), begin, end)
                    self._publisher.publish(handoff, key, piece)
                case act.Discard(key=key):
                    self._publisher.discard(key)
        return sends

    # --- views

    @property
    def is_idle(self) -> bool:
        """Nothing is lent."""
        return self._lender.is_idle

    def snapshot(self) -> dict[str, Any]:
        """What is lent now."""
        return self._lender.snapshot()
