"""Between the protos of PeerService and `jdisagg.handoff`: the messages of a hand-off stream. Hello: `identity_codec`.

An event this version does not know decodes to None, like a heartbeat: it shows life and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from google.protobuf.message import Message

from jdisagg.api.codec import (
    decode_error,
    decode_fields,
    decode_output,
    decode_request,
    encode_error,
    encode_fields,
    encode_output,
    encode_request,
)
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
_EVENTS = {  # by the name of what they hold
    event.message_type.name: event.name
    for stream in (peer_pb2.PrefillRequest, peer_pb2.PrefillResponse)
    for event in stream.DESCRIPTOR.fields
    if event.message_type is not None
}


def encode_down(message: Down, *, epoch: str, now_s: float, pulse: str = "") -> peer_pb2.PrefillRequest:
    """D -> P. Of Open: `epoch` is P's, from Hello; `pulse` is shared with the streams of the same one."""
    if isinstance(message, Open):
        request = encode_request(message.request, now_s)
        lending = None if message.lending is None else encode_fields(message.lending, peer_pb2.Lending)
        event = encode_fields(message, peer_pb2.Open, request=request, lending=lending, epoch=epoch, pulse=pulse)
        return peer_pb2.PrefillRequest(open=event)
    return peer_pb2.PrefillRequest(**_as_event(message))


def decode_down(message: peer_pb2.PrefillRequest, now_s: float) -> Down | None:
    """Raises InvalidRequest when Open holds no valid request, or a chunk's shape does not have four axes."""
    return _decode_open(message.open, now_s) if message.HasField("open") else _decode_event(message)


def encode_up(message: Up) -> peer_pb2.PrefillResponse:
    """P -> D."""
    match message:
        case Done():
            return peer_pb2.PrefillResponse(
                done=peer_pb2.Done(first=encode_output(message.first), num_chunks=message.num_chunks)
            )
        case Refused():
            return peer_pb2.PrefillResponse(refused=peer_pb2.Refused(error=encode_error(message.error)))
        case _:
            return peer_pb2.PrefillResponse(**_as_event(message))


def decode_up(message: peer_pb2.PrefillResponse) -> Up | None:
    """Raises InvalidRequest for a chunk whose shape does not have four axes, and for a score that is none."""
    return _decode_event(message)


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


def _as_event(message: Down | Up) -> dict[str, Any]:
    """One that holds nothing but values, and a range of tokens, by its name; it is called on the wire as here."""
    name = type(message).__name__
    kind: type[Message] = getattr(peer_pb2, name)
    if isinstance(message, Want | ChunkReady):
        return {_EVENTS[name]: encode_fields(message, kind, range=peer_pb2.Range(begin=message.begin, end=message.end))}
    return {_EVENTS[name]: encode_fields(message, kind)}


def _decode_event(message: Message) -> Any:
    """What either side may say, but for Open; None for what is not known."""
    name = message.WhichOneof("event") or ""
    return _DECODERS[name](getattr(message, name)) if name in _DECODERS else None


def _decode_open(message: peer_pb2.Open, now_s: float) -> Open:
    request = decode_request(message.request, now_s)
    if message.held_tokens < 0:
        raise InvalidRequest(f"held_tokens: wanted >= 0, got {message.held_tokens}", field="held_tokens")
    return decode_fields(
        message,
        Open,
        request=request,
        head_shards=max(1, message.head_shards),
        max_piece_tokens=max(0, message.max_piece_tokens) or None,
        lending=decode_fields(message.lending, Lending, text=_name) if message.HasField("lending") else None,
    )


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


def _decode_chunk(message: peer_pb2.ChunkReady) -> ChunkReady:
    if len(message.shape) != 4:
        key, shape = told(message.key), list(message.shape[:8])
        raise InvalidRequest(f"chunk {key}: wanted shape [layers, tokens, heads, features], got {shape}")
    layers, tokens, heads, features = message.shape
    begin, end, shape = message.range.begin, message.range.end, (layers, tokens, heads, features)
    return decode_fields(message, ChunkReady, text=_name, begin=begin, end=end, shape=shape)


def _decode_want(message: peer_pb2.Want) -> Want:
    begin, end, reason = message.range.begin, message.range.end, told(message.reason)
    return decode_fields(message, Want, text=_name, begin=begin, end=end, reason=reason)


_DECODERS: dict[str, Callable[[Any], Down | Up]] = {
    "grant": partial(decode_fields, data=Grant),
    "ack": partial(decode_fields, data=Ack),
    "want": _decode_want,
    "chunk_ready": _decode_chunk,
    "declined": partial(decode_fields, data=Declined, text=told),
    "accepted": partial(decode_fields, data=Accepted),
    "started": partial(decode_fields, data=Started),
    "parked": partial(decode_fields, data=Parked),
    "done": lambda done: decode_fields(done, Done, first=_decode_first(done.first)),
    "refused": lambda refused: Refused(error=decode_error(refused.error)),
}
