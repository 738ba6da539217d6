"""Between the protos of PeerService and `jdisagg.handoff`: the messages of a hand-off stream. Hello: `identity_codec`.

An event this version does not know decodes to None, like a heartbeat: it shows life and changes nothing.
"""

from __future__ import annotations

from math import inf

from jdisagg.api.codec import decode_error, decode_output, decode_request, encode_error, encode_output, encode_request
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Output
from jdisagg.core.told import MOST_CHARACTERS, told
from jdisagg.handoff.messages import (
    Accepted,
    Ack,
    ChunkReady,
    Declined,
    Done,
    Down,
    Grant,
    Lending,
    Open,
    Parked,
    Refused,
    Started,
    Up,
    Want,
)
from jdisagg.v1 import common_pb2, peer_pb2

DOWN_HEARTBEAT = peer_pb2.PrefillRequest(heartbeat=peer_pb2.PrefillRequest.Heartbeat())
UP_HEARTBEAT = peer_pb2.PrefillResponse(heartbeat=peer_pb2.PrefillResponse.Heartbeat())
MOST_COUNTED = 2**40  # tokens or bytes of one hand-off


def encode_down(message: Down, *, epoch: str, now_s: float, pulse: str = "") -> peer_pb2.PrefillRequest:
    """D -> P. Of Open: `epoch` is P's, from Hello; `pulse` is shared with the streams of the same one."""
    match message:
        case Open():
            event = peer_pb2.Open(
                request=encode_request(message.request, now_s),
                held_tokens=message.held_tokens,
                epoch=epoch,
                pulse=pulse,
                backend=message.backend,
                backends=message.backends,
                head_shards=message.head_shards,
                max_piece_tokens=message.max_piece_tokens or 0,
                lending=None if message.lending is None else _encode_lending(message.lending),
                goes_on=message.goes_on,
            )
            return peer_pb2.PrefillRequest(open=event)
        case Grant():
            return peer_pb2.PrefillRequest(grant=peer_pb2.Grant(credit_bytes=message.credit_bytes))
        case Ack():
            return peer_pb2.PrefillRequest(ack=peer_pb2.Ack(key=message.key))
        case Want():
            return peer_pb2.PrefillRequest(want=_encode_want(message))
        case ChunkReady():
            return peer_pb2.PrefillRequest(chunk_ready=_encode_chunk(message))
        case Declined():
            return peer_pb2.PrefillRequest(declined=peer_pb2.Declined(reason=message.reason))


def decode_down(message: peer_pb2.PrefillRequest, now_s: float) -> Down | None:
    """Raises InvalidRequest when Open holds no valid request, or a chunk's shape does not have four axes."""
    match message.WhichOneof("event"):
        case "open":
            request = decode_request(message.open.request, now_s)
            if message.open.held_tokens < 0:
                raise InvalidRequest(f"held_tokens: wanted >= 0, got {message.open.held_tokens}", field="held_tokens")
            return Open(
                request=request,
                held_tokens=message.open.held_tokens,
                backend=message.open.backend,
                backends=tuple(message.open.backends),
                head_shards=max(1, message.open.head_shards),
                max_piece_tokens=max(0, message.open.max_piece_tokens) or None,
                lending=_decode_lending(message.open.lending) if message.open.HasField("lending") else None,
                goes_on=message.open.goes_on,
            )
        case "grant":
            return Grant(credit_bytes=message.grant.credit_bytes)
        case "ack":
            return Ack(key=message.ack.key)
        case "want":
            return _decode_want(message.want)
        case "chunk_ready":
            return _decode_chunk(message.chunk_ready)
        case "declined":
            return Declined(reason=told(message.declined.reason))
        case _:
            return None


def encode_up(message: Up) -> peer_pb2.PrefillResponse:
    """P -> D."""
    match message:
        case Accepted():
            return peer_pb2.PrefillResponse(accepted=peer_pb2.Accepted(cached_tokens=message.cached_tokens))
        case Started():
            return peer_pb2.PrefillResponse(started=peer_pb2.Started())
        case Parked():
            return peer_pb2.PrefillResponse(parked=peer_pb2.Parked())
        case ChunkReady():
            return peer_pb2.PrefillResponse(chunk_ready=_encode_chunk(message))
        case Done():
            return peer_pb2.PrefillResponse(
                done=peer_pb2.Done(first=encode_output(message.first), num_chunks=message.num_chunks)
            )
        case Refused():
            return peer_pb2.PrefillResponse(refused=peer_pb2.Refused(error=encode_error(message.error)))
        case Want():
            return peer_pb2.PrefillResponse(want=_encode_want(message))
        case Grant():
            return peer_pb2.PrefillResponse(grant=peer_pb2.Grant(credit_bytes=message.credit_bytes))
        case Ack():
            return peer_pb2.PrefillResponse(ack=peer_pb2.Ack(key=message.key))


def decode_up(message: peer_pb2.PrefillResponse) -> Up | None:
    """Raises InvalidRequest for a chunk whose shape does not have four axes, and for a score that is none."""
    match message.WhichOneof("event"):
        case "accepted":
            return Accepted(cached_tokens=message.accepted.cached_tokens)
        case "started":
            return Started()
        case "parked":
            return Parked()
        case "chunk_ready":
            return _decode_chunk(message.chunk_ready)
        case "done":
            return Done(first=_decode_first(message.done.first), num_chunks=message.done.num_chunks)
        case "refused":
            return Refused(error=decode_error(message.refused.error))
        case "want":
            return _decode_want(message.want)
        case "grant":
            return Grant(credit_bytes=message.grant.credit_bytes)
        case "ack":
            return Ack(key=message.ack.key)
        case _:
            return None


class UpStream:
    """Reads what one P says on one stream, as today's P would say it.

    A P older than `Started` takes its memory without a word: its first chunk or token shows that it has.
    """

    def __init__(self) -> None:
        self._started = False

    def read(self, wire: peer_pb2.PrefillResponse) -> list[Up]:
        """The messages in `wire`, in order; none for a heartbeat. Raises as `decode_up`."""
        message = decode_up(wire)
        if message is None:
            return []
        implied = isinstance(message, ChunkReady | Done) and not self._started
        self._started |= isinstance(message, Started | ChunkReady | Done)
        return [Started(), message] if implied else [message]


def _decode_first(message: common_pb2.Output) -> Output:
    """Its scores go to the client as they are, and no answer can be written with one that is no number or of no token. Its
    counts are added to those of other hand-offs, and no answer can be written with a sum of more than 63 bits."""
    for scored in (*message.logprobs, *message.prompt_logprobs):
        for score in (scored, *scored.top):
            if score.token_id < 0 or not score.logprob < inf:
                raise InvalidRequest(f"Done with log-probability {score.logprob} of token {score.token_id}")
    for field, value in message.provenance.ListFields():
        if isinstance(value, int) and not 0 <= value <= MOST_COUNTED:
            raise InvalidRequest(f"Done with {field.name} {value}, wanted 0 to {MOST_COUNTED}")
    return decode_output(message)


def _name(text: str) -> str:
    """`text`, which means something to this process and is told in logs: cut it would mean something else."""
    if told(text) != text:
        raise InvalidRequest(
            f"a name of {len(text)} characters, wanted {MOST_CHARACTERS} printable ones at most: {told(text, 40)}"
        )
    return text


def _encode_lending(lending: Lending) -> peer_pb2.Lending:
    return peer_pb2.Lending(address=lending.address, backend=lending.backend, dtype=lending.dtype)


def _decode_lending(message: peer_pb2.Lending) -> Lending:
    return Lending(address=_name(message.address), backend=_name(message.backend), dtype=_name(message.dtype))


def _encode_chunk(message: ChunkReady) -> peer_pb2.ChunkReady:
    return peer_pb2.ChunkReady(
        key=message.key,
        range=peer_pb2.Range(begin=message.begin, end=message.end),
        group=message.group,
        shape=message.shape,
        dtype=message.dtype,
        num_bytes=message.num_bytes,
        checksum=message.checksum,
        backend=message.backend,
        locator=message.locator,
    )


def _decode_chunk(message: peer_pb2.ChunkReady) -> ChunkReady:
    if len(message.shape) != 4:
        key, shape = told(message.key), list(message.shape[:8])
        raise InvalidRequest(f"chunk {key}: wanted shape [layers, tokens, heads, features], got {shape}")
    layers, tokens, heads, features = message.shape
    return ChunkReady(
        key=_name(message.key),
        begin=message.range.begin,
        end=message.range.end,
        shape=(layers, tokens, heads, features),
        dtype=_name(message.dtype),
        num_bytes=message.num_bytes,
        checksum=message.checksum,
        group=message.group,
        backend=_name(message.backend),
        locator=_name(message.locator),
    )


def _encode_want(message: Want) -> peer_pb2.Want:
    reach = peer_pb2.Range(begin=message.begin, end=message.end)
    return peer_pb2.Want(
        range=reach,
        reason=message.reason,
        group=message.group,
        backend=message.backend,
        piece_tokens=message.piece_tokens,
    )


def _decode_want(message: peer_pb2.Want) -> Want:
    return Want(
        begin=message.range.begin,
        end=message.range.end,
        reason=told(message.reason),
        group=message.group,
        backend=_name(message.backend),
        piece_tokens=message.piece_tokens,
    )
