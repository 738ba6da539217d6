"""One stream as D sees it: what P announced, what of that is in place, and what P may publish.

    OPENING -> ASKED -> ACCEPTED -> TRANSFERRING -> COMPUTED
          `---------------^  `-------------------------^      nobody tells when it left; nothing was to be sent, or nothing yet

A piece is announced, fetched, and settled (imported) or wanted anew: then its range is announced again, under another key.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum

from jdisagg.handoff.actions import CancelFetch, CloseStream, DecodeAction, Fetch, Send
from jdisagg.handoff.credit import Credit
from jdisagg.handoff.line import IncomingPiece, Line
from jdisagg.handoff.messages import ChunkReady, HandoffId, Want
from jdisagg.handoff.spans import GroupSpans

FETCH_GRACE_S = 1.0  # a fetch that has not even reported its time-out by then is taken for lost


class InboundStage(Enum):
    """How far the stream is."""

    OPENING = "opening"  # Open is to be sent: Hello comes first, and others are before it in D's event loop
    ASKED = "asked"  # it has left, P has not answered
    ACCEPTED = "accepted"  # P has queued the request
    TRANSFERRING = "transferring"  # at least one piece was announced
    COMPUTED = "computed"  # Done arrived; pieces or pages may be missing


_S = InboundStage
_NEXT = {
    _S.OPENING: (_S.ASKED, _S.ACCEPTED),
    _S.ASKED: (_S.ACCEPTED,),
    _S.ACCEPTED: (_S.TRANSFERRING, _S.COMPUTED),
    _S.TRANSFERRING: (_S.COMPUTED,),
    _S.COMPUTED: (),
}
NOT_ACCEPTED = (_S.OPENING, _S.ASKED)


@dataclass(slots=True)
class InboundStream:
    """One stream of D: pieces announced and not yet imported, and what was."""

    handoff: HandoffId
    line: Line  # the peer's, shared by all of its streams
    progress_s: float  # when P last said something
    announced: GroupSpans
    imported: GroupSpans
    credit: Credit
    backends: tuple[str, ...]  # that both sides can use, best first
    stage: InboundStage = InboundStage.OPENING
    broken: set[str] = field(default_factory=set)  # those of them that failed this request
    pieces: dict[str, IncomingPiece] = field(default_factory=dict)
    refetches: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # by (group, begin, end)
    settled_bytes: int = 0  # announced pieces that D has imported or wants anew
    cached_tokens: int = 0  # prompt tokens P had in its prefix cache
    has_started: bool = False  # P computes the prompt, or has
    silent_s: float = 0.0  # nothing comes from P, for so much longer than it should; 0.0 = it is heard
    is_parked: bool = False  # P computes the prompt again, when memory allows: no piece is due yet

    @property
    def peer(self) -> str:
        """Who publishes."""
        return self.line.peer

    def move(self, stage: InboundStage) -> None:
        """Change stage; anything the table does not list is our bug."""
        assert stage in _NEXT[self.stage], f"hand-off {self.handoff}: {self.stage.value} -> {stage.value}"
        self.stage = stage

    def announce(self, ready: ChunkReady) -> IncomingPiece:
        """A piece can be fetched."""
        ready = ready if ready.backend else replace(ready, backend=self.backends[0])
        self.announced.of(ready.group).add(ready.begin, ready.end)
        self.pieces[ready.key] = IncomingPiece(ready)
        return self.pieces[ready.key]

    def settle(self, key: str) -> ChunkReady:
        """The piece is in place."""
        ready = self._take_out(key)
        self.imported.of(ready.group).add(ready.begin, ready.end)
        return ready

    def want_anew(self, ready: ChunkReady, reason: str, backend: str = "") -> DecodeAction:
        """The piece is not fetched under its key: have P publish its range again."""
        self._take_out(ready.key)
        self.announced.of(ready.group).remove(ready.begin, ready.end)
        want = Want(begin=ready.begin, end=ready.end, reason=reason, group=ready.group, backend=backend)
        return Send(self.handoff, want)

    def fetch(self, piece: IncomingPiece, deadline_s: float, now_s: float) -> Fetch:
        """Start (again) to fetch an announced piece, within the request's deadline."""
        return Fetch(self.handoff, self.peer, piece.ready, self.line.begin(piece, deadline_s, now_s))

    def _take_out(self, key: str) -> ChunkReady:
        piece = self.pieces.pop(key)
        self.line.end(piece)
        self.settled_bytes += piece.ready.num_bytes
        return piece.ready

    def close(self) -> list[DecodeAction]:
        """Nothing of it is wanted any more."""
        for piece in self.pieces.values():
            self.line.end(piece)
        return [CancelFetch(self.handoff), CloseStream(self.handoff)]

    def await_fetches(self, still_s: float, deadline_s: float, now_s: float) -> None:
        """D stood still for `still_s` until now: they have so much longer, as far as they were under way, within the request's
        deadline, for what they bring may be on its way to the engine."""
        for piece in self.pieces.values():
            if piece.fetch_deadline_s is not None:
                piece.fetch_deadline_s = min(piece.fetch_deadline_s + min(still_s, now_s - piece.began_s), deadline_s)

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
        pieces = list(self.pieces.values())
        return [CancelFetch(self.handoff), *(self.want_anew(piece.ready, reason, backend) for piece in pieces)]

    def grant(self) -> list[DecodeAction]:
        """Let P publish a window of bytes beyond what is settled here."""
        grant = self.credit.beyond(self.settled_bytes)
        return [] if grant is None else [Send(self.handoff, grant)]
