"""One hand-off as D sees it: what the request needs, and the stream that is bringing it now.

    OPENING -> ACCEPTED -> TRANSFERRING -> COMPUTED -> (complete)
       ^___________|____________|_____________|            stream lost: another one from the ladder
       WAITING  <- any of the four                         nobody to ask just now

A complete, failed, local or released hand-off is not a stage: its record is gone. Having pages (`reserved`) is independent
of the stage: a stream is opened, answered, and may end before memory exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from jdisagg.core.errors import DeadlineExceeded, HandoffLost, RequestError, Unavailable
from jdisagg.core.requests import EngineRequest, Output, Provenance
from jdisagg.handoff.actions import CancelFetch, DecodeAction, Fetch, Send
from jdisagg.handoff.ladder import Ladder
from jdisagg.handoff.messages import ChunkReady, Grant, HandoffId, Want
from jdisagg.handoff.spans import GroupSpans

FETCH_TIMEOUT_S = 5.0  # one piece
FETCH_GRACE_S = 1.0  # a fetch that has not even reported its time-out by then is taken for lost


class InboundStage(Enum):
    """Where D's hand-off is."""

    OPENING = "opening"  # Open sent, P has not answered
    ACCEPTED = "accepted"  # P has queued the request
    TRANSFERRING = "transferring"  # at least one piece was announced
    COMPUTED = "computed"  # Done arrived; pieces or pages may be missing
    WAITING = "waiting"  # no stream; asks again at `retry_at_s`


_S = InboundStage
_LOST = frozenset({_S.OPENING, _S.WAITING})
_NEXT = {
    _S.OPENING: _LOST | {_S.ACCEPTED},
    _S.ACCEPTED: _LOST | {_S.TRANSFERRING, _S.COMPUTED},
    _S.TRANSFERRING: _LOST | {_S.COMPUTED},
    _S.COMPUTED: _LOST,
    _S.WAITING: frozenset({_S.OPENING}),
}


@dataclass(slots=True)
class IncomingPiece:
    """An announced piece. `fetch_deadline_s` is None while no fetch is under way."""

    ready: ChunkReady
    fetch_deadline_s: float | None = None


@dataclass(slots=True)
class InboundStream:
    """One stream of D: pieces announced and not yet imported, and what was."""

    handoff: HandoffId
    peer: str
    progress_s: float  # when P last said something
    announced: GroupSpans
    imported: GroupSpans
    backends: tuple[str, ...]  # that both sides can use, best first
    broken: set[str] = field(default_factory=set)  # those of them that failed this request
    pieces: dict[str, IncomingPiece] = field(default_factory=dict)
    refetches: dict[tuple[int, int, int], int] = field(default_factory=dict)  # (group, begin, end) -> times
    settled_bytes: int = 0  # announced pieces that D has imported or given up
    granted_bytes: int = 0
    cached_tokens: int = 0  # prompt tokens P had in its prefix cache
    is_parked: bool = False  # P computes the prompt again, when memory allows: no piece is due yet

    def announce(self, ready: ChunkReady) -> IncomingPiece:
        """A piece can be fetched."""
        ready = ready if ready.backend else replace(ready, backend=self.backends[0])
        self.announced.of(ready.group).add(ready.begin, ready.end)
        self.pieces[ready.key] = IncomingPiece(ready)
        return self.pieces[ready.key]

    def settle(self, key: str) -> ChunkReady:
        """The piece is in place."""
        ready = self.pieces.pop(key).ready
        self.imported.of(ready.group).add(ready.begin, ready.end)
        self.settled_bytes += ready.num_bytes
        return ready

    def give_up(self, key: str) -> None:
        """The piece will not be fetched under this key; its range may be announced again."""
        ready = self.pieces.pop(key).ready
        self.announced.of(ready.group).remove(ready.begin, ready.end)
        self.settled_bytes += ready.num_bytes

    def fetch(self, piece: IncomingPiece, deadline_s: float, now_s: float) -> Fetch:
        """Start (again) to fetch an announced piece, within the request's deadline."""
        piece.fetch_deadline_s = min(now_s + FETCH_TIMEOUT_S, deadline_s)
        return Fetch(self.handoff, self.peer, piece.ready, piece.fetch_deadline_s)

    def overdue(self, now_s: float) -> list[str]:
        """Keys whose fetch should have answered by now."""
        return [
            key
            for key, piece in self.pieces.items()
            if piece.fetch_deadline_s is not None and now_s >= piece.fetch_deadline_s + FETCH_GRACE_S
        ]

    def backend_beside(self, failed: str) -> str | None:
        """The best backend that has not failed this request, `failed` left out."""
        return next((name for name in self.backends if name != failed and name not in self.broken), None)

    def change_backend(self, failed: str, backend: str, reason: str) -> list[DecodeAction]:
        """`failed` is no longer used: everything announced and not yet in place is to come over `backend`."""
        self.broken.add(failed)
        self.refetches.clear()
        wants: list[DecodeAction] = [CancelFetch(self.handoff)]
        for ready in [piece.ready for piece in self.pieces.values()]:
            self.give_up(ready.key)
            wants.append(self.want(ready, reason, backend))
        return wants

    def want(self, ready: ChunkReady, reason: str, backend: str = "") -> DecodeAction:
        """Have P publish the range again."""
        want = Want(begin=ready.begin, end=ready.end, reason=reason, group=ready.group, backend=backend)
        return Send(self.handoff, want)

    def grant(self, window_bytes: int) -> list[DecodeAction]:
        """Let P publish `window_bytes` beyond what is settled here."""
        credit_bytes = self.settled_bytes + window_bytes
        if credit_bytes <= self.granted_bytes:
            return []
        self.granted_bytes = credit_bytes
        return [Send(self.handoff, Grant(credit_bytes=credit_bytes))]


@dataclass(slots=True)
class Inbound:
    """One request whose KV comes from elsewhere."""

    request: EngineRequest
    held_tokens: int  # [0, held_tokens) is in place here
    ladder: Ladder
    stage: InboundStage = InboundStage.WAITING
    stream: InboundStream | None = None
    reserved: bool = False
    retry_at_s: float = 0.0
    first: Output | None = None
    recoveries: list[str] = field(default_factory=list)
    transferred_tokens: int = 0
    transferred_bytes: int = 0
    borrowed_tokens: int = 0  # that P fetched from here, over all streams
    borrowed_bytes: int = 0

    def move(self, stage: InboundStage) -> None:
        """Change stage; anything the table does not list is our bug."""
        assert stage in _NEXT[self.stage], f"request {self.request.request_id}: {self.stage.value} -> {stage.value}"
        self.stage = stage

    def wait(self, now_s: float) -> list[DecodeAction]:
        """Nobody can be asked just now: pause."""
        self.move(InboundStage.WAITING)
        self.retry_at_s = now_s + self.ladder.pause()
        return []

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV must be in place, whoever computes them."""
        return len(self.request.token_ids)

    @property
    def needs_kv(self) -> bool:
        """A request with one token to go ends with P's token: nothing is transferred for it."""
        return self.request.remaining_tokens > 1

    @property
    def covered(self) -> bool:
        """Whether KV of every token is in place."""
        stream_reach = self.held_tokens if self.stream is None else self.stream.imported.reach(self.held_tokens)
        return stream_reach >= self.num_tokens

    def complaint(self, ready: ChunkReady, chunk_tokens: int) -> str | None:
        """What is wrong with an announced piece, or None."""
        assert self.stream is not None
        span = f"piece [{ready.begin}, {ready.end})"
        if not 0 <= ready.group < self.stream.announced.num_groups:
            return f"{span} is of KV group {ready.group}; this cache has {self.stream.announced.num_groups}"
        if not self.held_tokens <= ready.begin < ready.end <= self.num_tokens:
            return f"{span} lies outside [{self.held_tokens}, {self.num_tokens})"
        if ready.end - ready.begin > chunk_tokens:
            return f"{span} is longer than --transfer-chunk-tokens {chunk_tokens}"
        if self.stream.announced.of(ready.group).overlaps(ready.begin, ready.end):
            return f"{span} was announced before"
        return None

    def count_borrowed(self, provenance: Provenance | None) -> None:
        """P has said with its first token what it fetched from here."""
        if provenance is not None:
            self.borrowed_tokens += provenance.borrowed_tokens
            self.borrowed_bytes += provenance.borrowed_bytes

    def provenance(self) -> Provenance:
        """Where the KV came from, as far as this side knows; pages and the decode worker are for the role to fill in."""
        known = self.first.provenance if self.first is not None and self.first.provenance is not None else Provenance()
        peer, cached_tokens = (self.stream.peer, self.stream.cached_tokens) if self.stream is not None else ("", 0)
        return replace(
            known,
            prefill_worker=known.prefill_worker or peer,
            prefilled_tokens=known.prefilled_tokens or self.num_tokens - cached_tokens,
            transferred_tokens=self.transferred_tokens,
            transferred_bytes=self.transferred_bytes,
            borrowed_tokens=self.borrowed_tokens,
            borrowed_bytes=self.borrowed_bytes,
            recoveries=tuple(self.recoveries),
        )

    def request_to_send(self) -> EngineRequest:
        """What P is asked to compute.

        Once a first token was delivered, later streams fetch the same KV and their token is ignored, so it must not end
        the request at P before the KV was sent.
        """
        if self.first is None:
            return self.request
        sampling = replace(self.request.sampling, ignore_eos=True, stop_token_ids=(), logprobs=None, prompt_logprobs=None)
        return replace(self.request, sampling=sampling)

    def too_late(self) -> DeadlineExceeded:
        """The error of a request whose deadline passed in the hand-off."""
        where = "without a prefill worker" if self.stream is None else f"with {self.stream.peer}"
        stage = self.stage.value
        return DeadlineExceeded(f"request {self.request.request_id}: deadline passed in the hand-off at stage {stage} {where}")

    def lost(self, peer: str, cause: str) -> RequestError:
        """The error of a request for which every rung failed, the last one at `peer`."""
        request_id, advice = self.request.request_id, "--local-prefill never forbids computing it here"
        if not self.ladder.peers:
            return Unavailable(f"request {request_id}: {cause}, and {advice}; name a worker with --prefill")
        where, tried = f"at stage {self.stage.value}, peer {peer}", ", ".join(self.ladder.peers)
        return HandoffLost(f"request {request_id}: hand-off lost {where}, cause: {cause}; tried {tried}; {advice}")

    def summary(self) -> dict[str, Any]:
        """JSON-able state."""
        stream = self.stream
        return {
            "stage": self.stage.value,
            "reserved": self.reserved,
            "peer": stream.peer if stream else "",
            "backends": list(stream.backends) if stream else [],
            "broken_backends": sorted(stream.broken) if stream else [],
            "serial": stream.handoff.serial if stream else 0,
            "held_tokens": self.held_tokens,
            "num_tokens": self.num_tokens,
            "pieces_on_the_way": len(stream.pieces) if stream else 0,
            "recoveries": list(self.recoveries),
        }
