"""The prefill role's part that fetches KV from decode workers: what `Borrower` decides, executed.

A request that borrows is REMOTE to the scheduler, as on a decode worker: it waits for pages, is TRANSFER while pieces come, and
then waits to be computed here. Its full pages are offered to the prefix index in between and found again when its turn comes,
so what was fetched is not computed; whatever the allocator needed meanwhile is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jdisagg.core.fleet import WHERE_TO_LOOK
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Provenance
from jdisagg.handoff import actions as act
from jdisagg.handoff.borrower import Borrowed, Borrower, BorrowerAction, Outcome
from jdisagg.handoff.messages import ChunkReady, Declined, HandoffId
from jdisagg.roles.ports import Runner
from jdisagg.roles.transfers import Transfers
from jdisagg.sched.scheduler import Scheduler
from jdisagg.transfer.base import Fetcher, Piece, PieceArrived, PieceFailed

log = logging.getLogger(__name__)

NO_KV_S = 30.0  # for which nothing is fetched from a D of which nothing came: each prompt would wait for a second in vain
TRY_S = 10.0  # so long after one prompt tries it again others follow, unless it has succeeded: it may have to wait first


class KVBorrowing:
    """Owned by the engine thread of a prefill worker. What it returns is for the role to send."""

    def __init__(
        self,
        borrower: Borrower,
        *,
        min_tokens: int,
        page_size: int,
        dtype: str,
        scheduler: Scheduler,
        runner: Runner,
        fetcher: Fetcher,
        metrics: Metrics,
    ) -> None:
        """`min_tokens`: fewer are computed; 0 = nothing is ever fetched. `dtype`: of KV here; other KV is not wanted."""
        self._borrower = borrower
        self._min_tokens = min_tokens
        self._page_size = page_size
        self._dtype = dtype
        self._scheduler = scheduler
        self._runner = runner
        self._fetcher = fetcher
        self._metrics = metrics
        self._transfers = Transfers(metrics)
        self._handoffs: dict[str, HandoffId] = {}  # of requests that borrow or have borrowed, until they are released
        self._ended: dict[str, Borrowed] = {}  # likewise, once that is over
        self._avoided: dict[str, float] = {}  # by address, until when, D of which nothing came

    # --- requests

    def consider(self, admit: act.Admit, now_s: float) -> None:
        """The request was just queued to be computed here: have it wait for D's KV instead, when that is worth it."""
        request, lending = admit.request, admit.lending
        request_id = request.request_id
        if not self._min_tokens or lending is None or (lending.backend, lending.dtype) != (self._fetcher.name, self._dtype):
            return
        if request.sampling.prompt_logprobs is not None:
            return  # every position is computed for them
        end = min(admit.held_tokens, request.num_tokens - 1) // self._page_size * self._page_size
        cached_tokens = self._scheduler.held_tokens(request_id)
        if end - cached_tokens < self._min_tokens or not self._may_ask(lending.address, now_s):
            return
        self._scheduler.fetch_first(request_id, end)
        begin = self._scheduler.held_tokens(request_id)
        if begin < cached_tokens:  # the pool is too full to pin what is here, too full for more
            self._scheduler.compute_locally(request_id)
            return
        self._handoffs[request_id] = admit.handoff
        self._borrower.start(admit.handoff, request_id, lending, (begin, end), request.deadline_s)

    def planned(self, now_s: float) -> list[act.Reply]:
        """Pages may have been reserved in the step just planned."""
        replies: list[act.Reply] = []
        for reserved in self._scheduler.take_reserved():
            replies += self._execute(self._borrower.on_reserved(reserved.request_id, now_s), now_s)
        return replies

    def sign(self, request_id: str, provenance: Provenance) -> Provenance:
        """Say in it what was borrowed for the request; other requests' stays as it is."""
        borrowed = self._ended.get(request_id)
        if borrowed is None:
            return provenance
        return replace(provenance, borrowed_tokens=borrowed.num_tokens, borrowed_bytes=borrowed.num_bytes)

    def release(self, request_id: str) -> None:
        """The hand-off is over; idempotent."""
        self._ended.pop(request_id, None)
        if handoff := self._handoffs.pop(request_id, None):
            self._execute(self._borrower.release(handoff), 0.0)  # nothing that it does looks at the time

    # --- events

    def on_message(self, handoff: HandoffId, message: ChunkReady | Declined, now_s: float) -> list[act.Reply]:
        """D has published something it lends, or will not."""
        return self._execute(self._borrower.on_message(handoff, message, now_s), now_s)

    def on_fetched(self, event: PieceArrived | PieceFailed, now_s: float) -> list[act.Reply]:
        """A transfer thread is through with a piece."""
        handoff, key = event.handoff, event.ready.key
        if isinstance(event, PieceFailed):
            if self._borrower.is_failure(handoff, key, event.reason, now_s):
                self._transfers.failed(event)
            return self._execute(self._borrower.on_failed(handoff, key, event.reason), now_s)
        self._transfers.arrived(event)
        return self._execute(self._borrower.on_arrived(handoff, key, now_s), now_s, event.piece)

    def tick(self, now_s: float) -> list[act.Reply]:
        """Time passes."""
        return self._execute(self._borrower.tick(now_s), now_s)

    # --- actions

    def _execute(self, actions: Sequence[BorrowerAction], now_s: float, piece: Piece | None = None) -> list[act.Reply]:
        """`piece`: what has just arrived, for its Import; when it is late, or came before, there is none."""
        replies: list[act.Reply] = []
        for action in actions:
            match action:
                case act.Reply():
                    replies.append(action)
                case act.Fetch(handoff=handoff, peer=peer, ready=ready, deadline_s=deadline_s):
                    self._fetcher.fetch(handoff, peer, ready, deadline_s)
                case act.CancelFetch(handoff=handoff):
                    self._fetcher.cancel(handoff)
                case act.Import(request_id=request_id):
                    assert piece is not None, f"request {request_id}: nothing has arrived"
                    self._runner.import_tokens(self._scheduler.page_table(request_id), piece)
                case Borrowed():
                    self._end(action, now_s)
        return replies

    def _end(self, borrowed: Borrowed, now_s: float) -> None:
        self._ended[borrowed.engine_request_id] = borrowed
        self._metrics.transfer.borrowings.labels(outcome=borrowed.outcome.value).inc()
        self._metrics.transfer.borrowed_tokens.inc(borrowed.num_tokens)
        if borrowed.num_tokens:
            self._avoided.pop(borrowed.lender, None)
        if borrowed.outcome is not Outcome.COMPLETE:
            where = f"request {borrowed.handoff.request_id}: borrowing from {borrowed.lender} {borrowed.outcome.value}"
            then = self._avoid(borrowed, now_s) if borrowed.no_kv else ""
            log.warning("%s after %d tokens: %s; the rest is computed here%s", where, borrowed.num_tokens, borrowed.cause, then)
        self._scheduler.compute_locally(borrowed.engine_request_id, borrowed.held_tokens)

    def _may_ask(self, lender: str, now_s: float) -> bool:
        """Whether KV can be expected from there. When the time is over one prompt finds out, for all."""
        if (until_s := self._avoided.get(lender)) is None:
            return True
        if now_s < until_s:
            return False
        self._avoided[lender] = now_s + TRY_S
        return True

    def _avoid(self, borrowed: Borrowed, now_s: float) -> str:
        """Fetch nothing from there for a while; says so. Where nothing was published it need not be the way to there."""
        kept = {one: until_s for one, until_s in self._avoided.items() if now_s < until_s + NO_KV_S}  # it has to be tried first
        self._avoided = kept | {borrowed.lender: now_s + NO_KV_S}
        look = f": look at its {WHERE_TO_LOOK}" if borrowed.announced else ""
        return f"; nothing is fetched from there for {NO_KV_S:g} s{look}"

    # --- views

    @property
    def is_idle(self) -> bool:
        """Nothing is borrowed."""
        return self._borrower.is_idle and not self._handoffs

    def snapshot(self) -> dict[str, Any]:
        """What is being borrowed."""
        return self._borrower.snapshot()
