"""When D gives up a P that is there and does not go on. Time in which D itself stood still blames nobody."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from jdisagg.handoff.inbound import Inbound
from jdisagg.handoff.inbound_stream import InboundStage, InboundStream

SEND_TIMEOUT_S = 60.0  # of Open: Hello has a time-out of its own, and that thousands are opened at once is no fault of a P
ANSWER_TIMEOUT_S = 10.0  # from there to Accepted or Refused
_TIMEOUTS_S = {InboundStage.OPENING: SEND_TIMEOUT_S, InboundStage.ASKED: ANSWER_TIMEOUT_S}


def forgive(records: Iterable[Inbound], still_s: float, now_s: float) -> None:
    """D stood still for `still_s` until now."""
    for record in records:
        if (stream := record.stream) is not None:
            stream.progress_s = min(now_s, stream.progress_s + still_s)
            stream.line.wait_anew(now_s)
        for stream in (record.stream, None if record.doubted is None else record.doubted.stream):
            if stream is not None:
                stream.await_fetches(still_s, record.request.deadline_s, now_s)


def unanswered(stream: InboundStream, now_s: float) -> str:
    """Why the stream is given up before P has taken the prompt on; "" = it is not."""
    timeout_s = _TIMEOUTS_S.get(stream.stage, inf)
    return f"no answer for {timeout_s:g} s" if now_s - stream.progress_s >= timeout_s else ""


def answer_due_s(stream: InboundStream) -> float:
    """When it is."""
    return stream.progress_s + _TIMEOUTS_S.get(stream.stage, inf)


def no_piece(record: Inbound, stream: InboundStream, lease_s: float, now_s: float) -> str:
    """Why the stream is given up though the prompt is computed and pages are here; "" = it is not."""
    missing = stream.stage is InboundStage.COMPUTED and record.reserved and record.stream is stream
    is_due = missing and not stream.pieces and not stream.is_parked
    if not is_due or stream.line.queued_bytes:  # its turn at P may come when the pieces of others have
        return ""
    idle_s = now_s - max(stream.progress_s, stream.line.arrived_s)
    return f"no piece for {idle_s:.1f} s after the prompt was computed" if idle_s >= lease_s else ""


def late_kv(record: Inbound, now_s: float, patience: int = 1) -> float:
    """For how long no KV came, where it is the one thing that is missing and that is too long, or `patience` times that; else
    0.0."""
    stream = record.stream
    if stream is None or not record.reserved or stream.stage is not InboundStage.COMPUTED:
        return 0.0
    sizes = [piece.ready.num_bytes for piece in stream.pieces.values()]  # all are being fetched
    return stream.line.late_s(max(sizes), now_s, patience) if sizes else 0.0
