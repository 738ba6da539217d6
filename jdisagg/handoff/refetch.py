"""A piece that did not arrive: the same key once more, another backend, a new key from P; behind that its stream is lost.

A backend over which nothing came twice in a row, whichever pieces these were, is done with, as is one whose port is shut.
"""

from __future__ import annotations

from dataclasses import replace

from jdisagg.handoff.actions import DecodeAction
from jdisagg.handoff.inbound import Inbound
from jdisagg.handoff.inbound_stream import InboundStream
from jdisagg.handoff.line import IncomingPiece

MAX_REFETCHES = 2  # of the same token range, per stream
UNREACHABLE = "unreachable"  # reason of a fetch: its backend's port is shut
OUT_OF_TIME = frozenset({"timeout", "slow", "stalled"})  # reasons of a fetch: the peer may be well, its KV does not come
_TOO_LITTLE_TIME = frozenset({"timeout", "slow"})
_MOMENT_S = 0.25
BY_DEADLINE = _TOO_LITTLE_TIME | {"unknown_key"}  # may be no more than that its request's time is over: P withdraws it, too


def is_too_late(record: Inbound, piece: IncomingPiece, reason: str, now_s: float) -> bool:
    """Whether the request's own time is over; see `is_over`."""
    return is_over(record.request.deadline_s, reason, now_s, is_hurried=piece.is_hurried)


def is_over(deadline_s: float, reason: str, now_s: float, *, is_hurried: bool) -> bool:
    """Whether the time of a request, until `deadline_s`, is over when its fetch ends. One that had no longer (`is_hurried`)
    may be heard of a moment before the clock says so; what is heard long before is of an earlier one of the piece."""
    early_s = _MOMENT_S if is_hurried and reason in _TOO_LITTLE_TIME else 0.0
    return now_s >= deadline_s - early_s


def next_try(
    record: Inbound, stream: InboundStream, piece: IncomingPiece, reason: str, now_s: float
) -> list[DecodeAction] | None:
    """For a piece of the hand-off's own stream, whichever of these it is; None when there is none left."""
    ready = piece.ready
    span = (ready.group, ready.begin, ready.end)
    num_refetches = stream.refetches[span]
    other = stream.backend_beside(ready.backend)
    is_dead = reason == "stalled" and stream.line.is_dead(ready.backend)
    is_shut = reason == UNREACHABLE  # before anything was sent: a moment of waiting was part of the try
    if (num_refetches or is_dead or is_shut) and other is not None and ready.backend not in stream.broken:
        stream.progress_s = now_s
        return [*go_on_over(other, record, stream, piece, reason), *record.grant()]
    if num_refetches >= MAX_REFETCHES or (is_dead and ready.backend not in stream.broken):
        return None  # where it has moved on already, P had announced the piece before it knew that
    stream.progress_s = now_s
    stream.refetches[span] += 1
    note = record.note("refetch", stream, cause_of(piece, reason))
    if num_refetches == 0 and reason != "unknown_key" and ready.backend not in stream.broken:
        return [note, stream.fetch(piece, record.request.deadline_s, now_s)]
    want = stream.want_anew(ready, reason)
    return [note, *record.grant(), want]


def new_key(stream: InboundStream, piece: IncomingPiece, reason: str) -> list[DecodeAction]:
    """The third of these at once, for a piece of a stream that was set aside, over what P publishes over now; nothing where its
    range was wanted too often."""
    ready = piece.ready
    span = (ready.group, ready.begin, ready.end)
    if stream.refetches[span] >= MAX_REFETCHES:
        return []
    stream.refetches[span] += 1
    want = stream.want_anew(ready, reason)
    return [*stream.grant(), want]


def go_on_over(other: str, record: Inbound, stream: InboundStream, piece: IncomingPiece, reason: str) -> list[DecodeAction]:
    """All that is missing is to come over the backend `other`, after a piece that did not."""
    failed = piece.ready.backend
    note = record.note("other_backend", stream, f"{cause_of(piece, reason)}; going on over {other}")
    note = replace(note, unreached=failed if reason == UNREACHABLE else "")
    return [note, *stream.change_backend(failed, other, reason)]


def cause_of(piece: IncomingPiece, reason: str) -> str:
    """For logs and counters."""
    ready = piece.ready
    return f"fetch of [{ready.begin}, {ready.end}) over {ready.backend}: {reason}"
