"""P's half of the mirror: a prompt's KV that D holds is fetched instead of computed again. Events in, actions out.

    start        P lacks [begin, end), D holds it and lends it; the request waits for pages, like one that will be computed
    on_reserved  pages exist: Want, and credit for a window of bytes
    on_message   ChunkReady: fetch; Declined: that was all
    on_arrived   a confirmed piece: Import, Ack, more credit; the last one ends the borrowing
    on_failed    fetch the same key once more; then that was all
    tick         no progress for STALL_S, or not all there after LONGEST_S: that was all
    release      the hand-off is over

Each borrowing ends in exactly one Borrowed, or with its hand-off. From then on P computes what is missing, so asking costs at
most LONGEST_S, and STALL_S when D does not answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from jdisagg.core.config import TransferConfig
from jdisagg.core.looks import Looks
from jdisagg.handoff import actions as act
from jdisagg.handoff.credit import Credit, window_bytes_of
from jdisagg.handoff.messages import Ack, ChunkReady, Declined, HandoffId, Lending, Want
from jdisagg.handoff.refetch import BY_DEADLINE, is_over
from jdisagg.handoff.spans import Spans

STALL_S = 1.0
LONGEST_S = 10.0
_NO_KV = frozenset({"connection", "unreachable", "stalled"})  # of a fetch, after which a D may be one of which none comes


class Outcome(Enum):
    """How a borrowing ended. Values are metric labels."""

    COMPLETE = "complete"
    DECLINED = "declined"
    FAILED = "failed"  # a piece did not come
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Compute the rest: KV of [0, held_tokens) is in place; `num_tokens` and `num_bytes` came from D. `cause` is for logs."""

    handoff: HandoffId
    engine_request_id: str
    held_tokens: int
    num_tokens: int
    num_bytes: int
    outcome: Outcome
    cause: str
    lender: str  # its address
    no_kv: bool = False  # it was waited for in vain, and nothing came from there meanwhile, for other prompts either
    announced: bool = False  # D had published something


BorrowerAction = act.Reply | act.Fetch | act.CancelFetch | act.Import | Borrowed


@dataclass(slots=True)
class Borrowing:
    """What one hand-off's P lacks and D has: tokens [begin, end)."""

    handoff: HandoffId
    engine_request_id: str
    lending: Lending
    begin: int
    end: int
    deadline_s: float  # the request's, and once pages exist this borrowing's
    credit: Credit  # D's
    is_hurried: bool = False  # it has no more time than the request
    progress_s: float = 0.0
    reserved: bool = False
    reached: bool = False  # something came from D since, for this prompt or another
    announced: Spans = field(default_factory=Spans)
    arrived: Spans = field(default_factory=Spans)
    pieces: dict[str, ChunkReady] = field(default_factory=dict)  # being fetched
    refetched: set[str] = field(default_factory=set)
    num_bytes: int = 0  # arrived

    def complaint(self, ready: ChunkReady, chunk_tokens: int) -> str | None:
        """What is wrong with an announced piece, or None."""
        span = f"piece [{ready.begin}, {ready.end}) of group {ready.group}"
        if not self.reserved:
            return f"{span} was announced before it was wanted"
        if ready.group or not self.begin <= ready.begin < ready.end <= self.end or ready.end - ready.begin > chunk_tokens:
            return f"{span}: wanted at most {chunk_tokens} tokens of [{self.begin}, {self.end}) of group 0"
        if ready.backend not in ("", self.lending.backend):
            return f"{span} is announced over {ready.backend!r}, wanted {self.lending.backend}"
        if self.announced.overlaps(ready.begin, ready.end):
            return f"{span} was announced before"
        return None


class Borrower:
    """Every borrowing of one prefill worker. Owned by its engine thread."""

    def __init__(self, config: TransferConfig, *, bytes_per_token: int) -> None:
        self._chunk_tokens = config.transfer_chunk_tokens
        self._window_bytes = window_bytes_of(config, bytes_per_token)
        self._looks = Looks()
        self._live: dict[HandoffId, Borrowing] = {}
        self._by_request: dict[str, Borrowing] = {}

    # --- hand-offs

    def start(
        self, handoff: HandoffId, engine_request_id: str, lending: Lending, span: tuple[int, int], deadline_s: float
    ) -> None:
        """KV of [0, span[0]) is here and pinned, that of the non-empty `span` is wanted as soon as there are pages."""
        begin, end = span
        assert begin < end, f"hand-off {handoff}: nothing to borrow in [{begin}, {end})"
        record = Borrowing(handoff, engine_request_id, lending, begin, end, deadline_s, Credit(self._window_bytes))
        self._live[handoff] = self._by_request[engine_request_id] = record

    def on_reserved(self, engine_request_id: str, now_s: float) -> list[BorrowerAction]:
        """The request has pages for its whole prompt."""
        record = self._by_request.get(engine_request_id)
        if record is None or record.reserved:
            return []
        record.reserved, record.progress_s = True, now_s
        record.is_hurried = record.deadline_s <= now_s + LONGEST_S
        record.deadline_s = min(record.deadline_s, now_s + LONGEST_S)
        want = Want(begin=record.begin, end=record.end, reason="held", piece_tokens=self._chunk_tokens)
        return [act.Reply(record.handoff, want), *self._grant(record)]

    def release(self, handoff: HandoffId) -> list[BorrowerAction]:
        """The hand-off is over; idempotent."""
        return [] if self._forget(handoff) is None else [act.CancelFetch(handoff)]

    # --- D

    def on_message(self, handoff: HandoffId, message: ChunkReady | Declined, now_s: float) -> list[BorrowerAction]:
        """A message of D. What nobody wants (any more) is acknowledged, so that D frees it."""
        record = self._live.get(handoff)
        if record is None:
            return [act.Reply(handoff, Ack(key=message.key))] if isinstance(message, ChunkReady) else []
        if isinstance(message, Declined):
            return self._end(record, Outcome.DECLINED, message.reason)
        if message.key in record.pieces:
            return []
        if complaint := record.complaint(message, self._chunk_tokens):
            return [act.Reply(handoff, Ack(key=message.key)), *self._end(record, Outcome.FAILED, complaint)]
        record.progress_s = now_s
        record.announced.add(message.begin, message.end)
        record.pieces[message.key] = message
        return [_fetch(record, message)]

    # --- the transfer

    def on_arrived(self, handoff: HandoffId, key: str, now_s: float) -> list[BorrowerAction]:
        """The piece is whole and on the device; late and duplicate ones give no Import and must be dropped."""
        record = self._live.get(handoff)
        ready = None if record is None else record.pieces.pop(key, None)
        if record is None or ready is None:
            return []
        record.progress_s = now_s
        for waiting in self._live.values():  # maybe behind this one
            waiting.reached |= waiting.reserved and waiting.lending.address == record.lending.address
        record.arrived.add(ready.begin, ready.end)
        record.num_bytes += ready.num_bytes
        actions: list[BorrowerAction] = [act.Import(record.engine_request_id, handoff, key), act.Reply(handoff, Ack(key=key))]
        if record.arrived.reach(record.begin) >= record.end:
            return actions + self._end(record, Outcome.COMPLETE, "")
        return actions + self._grant(record)

    def is_failure(self, handoff: HandoffId, key: str, reason: str, now_s: float) -> bool:
        """As DecodeSide's: whether it is one of the transfer, and not of a request whose time is over, that the piece did not
        arrive."""
        if reason not in BY_DEADLINE:
            return True
        record = self._live.get(handoff)
        if record is None or key not in record.pieces:
            return False
        return not record.is_hurried or not is_over(record.deadline_s, reason, now_s, is_hurried=True)

    def on_failed(self, handoff: HandoffId, key: str, reason: str) -> list[BorrowerAction]:
        """The piece did not arrive: once more, unless D does not know it; computing is the cure for everything else."""
        record = self._live.get(handoff)
        ready = None if record is None else record.pieces.get(key)
        if record is None or ready is None:
            return []
        if key in record.refetched or reason == "unknown_key":
            return self._end(record, Outcome.FAILED, f"fetch of [{ready.begin}, {ready.end}): {reason}", no_kv=reason in _NO_KV)
        record.refetched.add(key)
        return [_fetch(record, ready)]

    def tick(self, now_s: float) -> list[BorrowerAction]:
        """Borrowings that stand still, while P does not, or take too long."""
        if still_s := self._looks.stood_still_s(now_s):
            for record in self._live.values():
                record.progress_s = min(now_s, record.progress_s + still_s)
        actions: list[BorrowerAction] = []
        for record in [record for record in self._live.values() if record.reserved]:
            if now_s - record.progress_s >= STALL_S:
                actions += self._end(record, Outcome.STALLED, f"no piece for {now_s - record.progress_s:.1f} s", no_kv=True)
            elif now_s >= record.deadline_s:
                came, wanted = record.arrived.num_tokens, record.end - record.begin
                actions += self._end(record, Outcome.STALLED, f"{came} of {wanted} tokens came in time")
        return actions

    # --- helpers

    def _grant(self, record: Borrowing) -> list[BorrowerAction]:
        grant = record.credit.beyond(record.num_bytes)
        return [] if grant is None else [act.Reply(record.handoff, grant)]

    def _end(self, record: Borrowing, outcome: Outcome, cause: str, *, no_kv: bool = False) -> list[BorrowerAction]:
        self._forget(record.handoff)
        acks = [act.Reply(record.handoff, Ack(key=key)) for key in record.pieces]
        held_tokens = record.arrived.reach(record.begin)
        sizes = (held_tokens, record.arrived.num_tokens, record.num_bytes)
        ended = Borrowed(record.handoff, record.engine_request_id, *sizes, outcome, cause, record.lending.address)
        ended = replace(ended, no_kv=no_kv and not record.reached, announced=record.announced.num_tokens > 0)
        return [act.CancelFetch(record.handoff), *acks, ended]

    def _forget(self, handoff: HandoffId) -> Borrowing | None:
        record = self._live.pop(handoff, None)
        if record is not None:
            del self._by_request[record.engine_request_id]
        return record

    # --- views

    @property
    def is_idle(self) -> bool:
        """Nothing is borrowed."""
        return not self._live

    def snapshot(self) -> dict[str, Any]:
        """Borrowings as JSON-able data."""
        return {
            record.engine_request_id: {
                "wanted": [record.begin, record.end],
                "arrived_tokens": record.arrived.num_tokens,
                "reserved": record.reserved,
                "from": record.lending.address,
            }
            for record in self._live.values()
        }


def _fetch(record: Borrowing, ready: ChunkReady) -> act.Fetch:
    """Bounded by the whole borrowing's deadline: `tick` sees when it stands still."""
    return act.Fetch(record.handoff, record.lending.address, ready, record.deadline_s)
