"""What a stream that was set aside still says and brings, while another P is asked as well.

A quiet one is gone back to as soon as it is heard. One whose KV did not come says what it likes: it gets credit and its fetches
are repeated as if it were the only one, until all of its KV is here, or the other P has something to show. So a pause of the
network costs no more than the pause, however long the queue of the other P is, and a line that crawls keeps nobody.
"""

from __future__ import annotations

from jdisagg.core.errors import RequestError
from jdisagg.core.requests import Output
from jdisagg.handoff import messages as msg
from jdisagg.handoff.actions import DecodeAction
from jdisagg.handoff.inbound import Doubted, Inbound
from jdisagg.handoff.ladder import is_final, is_unfit
from jdisagg.handoff.line import IncomingPiece
from jdisagg.handoff.messages import PrefillToDecode
from jdisagg.handoff.recovery import Recovery
from jdisagg.handoff.refetch import OUT_OF_TIME, UNREACHABLE, go_on_over, new_key


class Doubts:
    """Owned by the DecodeSide."""

    def __init__(self, recovery: Recovery, chunk_tokens: int) -> None:
        """`chunk_tokens`: of the longest piece."""
        self._recovery = recovery
        self._chunk_tokens = chunk_tokens

    def on_message(
        self, record: Inbound, doubted: Doubted, message: PrefillToDecode, now_s: float
    ) -> tuple[list[DecodeAction], bool]:
        """What follows, and whether the stream is the request's own again, so that the message is to be taken as such."""
        match message:
            case msg.StreamEnded(reason=reason, error=error):
                record.ended(doubted.stream, message)
                return self._recovery.move_on(record, now_s, reason if error is None else f"{reason}: {error}", error), False
            case msg.Awake() if not doubted.no_kv:
                return self._recovery.go_back(record, now_s), False
            case msg.Quiet() | msg.Awake():
                return [], False
            case msg.ChunkReady() if doubted.no_kv:
                return self._on_chunk(record, doubted, message, now_s), False
            case msg.Refused(error=error) | msg.Done(first=Output(error=RequestError() as error)) if is_unfit(error):
                return self._recovery.move_on(record, now_s, f"refused: {error}", error), False
            case msg.Refused(error=error) if not is_final(error):
                return self._recovery.move_on(record, now_s), False
            case _:
                return self._recovery.go_back(record, now_s), True

    def on_arrived(self, record: Inbound, doubted: Doubted, now_s: float) -> list[DecodeAction]:
        """A piece of it is in place."""
        if record.is_covered_by_doubted:
            return self._recovery.go_back(record, now_s)
        return doubted.stream.grant() if doubted.no_kv else []

    def on_failed(
        self, record: Inbound, doubted: Doubted, piece: IncomingPiece, reason: str, now_s: float
    ) -> list[DecodeAction]:
        """A piece of it did not come. Those that waited in vain are asked for again; over another backend, if there is one,
        where connections are not accepted, are reset, or brought nothing twice. Others when it is gone back to."""
        stream, backend = doubted.stream, piece.ready.backend
        stream.line.end(piece)
        if not doubted.no_kv:
            return []
        if backend in stream.broken:  # P had announced it before it knew that
            return new_key(stream, piece, reason)
        is_useless = reason in (UNREACHABLE, "connection") or (reason == "stalled" and stream.line.is_dead(backend))
        if is_useless and (other := stream.backend_beside(backend)) is not None:
            return [*go_on_over(other, record, stream, piece, reason), *stream.grant()]
        return [stream.fetch(piece, record.request.deadline_s, now_s)] if reason in OUT_OF_TIME else []

    def _on_chunk(self, record: Inbound, doubted: Doubted, ready: msg.ChunkReady, now_s: float) -> list[DecodeAction]:
        stream = doubted.stream
        if ready.key in stream.pieces:
            return []
        if complaint := record.complaint(stream, ready, self._chunk_tokens):
            return self._recovery.move_on(record, now_s, f"protocol: {complaint}")
        return [stream.fetch(stream.announce(ready), record.request.deadline_s, now_s)]
