"""One message of every kind with every field set, and what the core makes of it. `record` writes them, the tests read them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jdisagg.api.codec import decode_error, decode_output, decode_request, given_sampling
from jdisagg.api.fleet.codec import decode_load, decode_member
from jdisagg.api.generation.intake import TextRequest
from jdisagg.api.generation.service import read_generate
from jdisagg.api.peer.codec import decode_down, decode_up
from jdisagg.api.peer.identity_codec import decode_identity
from jdisagg.core.fleet import Member
from jdisagg.core.requests import SamplingParams
from jdisagg.handoff.identity import Identity
from jdisagg.v1 import common_pb2, fleet_pb2, generation_pb2, peer_pb2, worker_pb2

NOW_S = 100.0  # deadlines are relative to it
FILES = tuple(module.DESCRIPTOR for module in (common_pb2, generation_pb2, worker_pb2, peer_pb2, fleet_pb2))

# values that a decoder checks, by the end of the field's path
_CHOSEN: dict[str, Any] = {
    "role": "decode",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "chunk_ready.shape": [2, 3, 4, 5],
    "ChunkReady.shape": [2, 3, 4, 5],
    "error.code": 8,
    "RequestFailure.code": 8,
    "kind": "window",
    "grammar.kind": 1,
    "Grammar.kind": 1,
    "dtype": "bfloat16",
    "absent": False,
    "prompt_logprobs[0].absent": True,
}

# what today's code makes of a message
CORE: dict[str, Callable[[Any], object]] = {
    "SamplingParams": lambda m: SamplingParams(**given_sampling(m)),
    "RequestFailure": decode_error,
    "EngineRequest": lambda m: decode_request(m, NOW_S),
    "Output": decode_output,
    "GenerateRequest": lambda m: read_generate(m, SamplingParams(), 9.0),
    "RunRequest": lambda m: [decode_request(submit.request, NOW_S) for submit in m.submits],
    "RunResponse": lambda m: [[decode_output(output) for output in m.outputs], decode_load(m.load)],
    "Load": decode_load,
    "Identity": decode_identity,
    "HelloRequest": lambda m: decode_identity(m.identity),
    "HelloResponse": lambda m: decode_identity(m.identity),
    "PrefillRequest": lambda m: decode_down(m, NOW_S),
    "PrefillResponse": decode_up,
    "Member": decode_member,
    "RegisterRequest": lambda m: decode_member(m.member),
    "ListResponse": lambda m: [decode_member(member) for member in m.members],
    "HeartbeatRequest": lambda m: decode_load(m.load),
}


def core(name: str, message: Message) -> object:
    """The core's value of a sample as plain data; None for a message that has none. `name` may end in ".VARIANT"."""
    decode = CORE.get(name.partition(".")[0])
    return None if decode is None else plain(decode(message))


def samples(file: FileDescriptor) -> Iterator[tuple[str, Message]]:
    """Every message of a .proto, those with a choice of events once per event, by name."""
    for descriptor in file.message_types_by_name.values():
        choices = [oneof for oneof in descriptor.oneofs if len(oneof.fields) > 1]
        if not choices:
            yield descriptor.name, _filled(descriptor, descriptor.name, None)
        for field in (field for oneof in choices for field in oneof.fields):
            yield f"{descriptor.name}.{field.name}", _filled(descriptor, descriptor.name, field.name)


def plain(value: object) -> Any:
    """Dataclasses, errors and enums as JSON-able data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        if isinstance(value, TextRequest):  # flat, as on the wire and when first recorded
            found |= found.pop("conversion")
        if isinstance(value, Member):  # likewise
            card, process = found.pop("card"), found.pop("process")
            found |= card | process | {"model": card["name"]}
        if isinstance(value, Member | Identity):  # which ones was not said when first recorded
            found |= {"grammars": bool(value.grammars), "grammar_kinds": sorted(kind.value for kind in value.grammars)}
        return found
    if isinstance(value, Exception):
        return {"error": type(value).__name__} | {name: plain(item) for name, item in vars(value).items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def _filled(descriptor: Descriptor, path: str, variant: str | None) -> Message:
    message = GetMessageClass(descriptor)()
    chosen = {oneof.name: variant or oneof.fields[0].name for oneof in descriptor.oneofs if len(oneof.fields) > 1}
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if oneof is not None and oneof.name in chosen and chosen[oneof.name] != field.name:
            continue
        _fill(message, field, f"{path}.{field.name}")
    return message


def _fill(message: Message, field: FieldDescriptor, path: str) -> None:
    target = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        target.update({10 + number: 0.5 + number for number in range(2)})
    elif field.is_repeated and field.message_type is not None:
        target.extend(_filled(field.message_type, f"{path}[{index}]", None) for index in range(2))
    elif field.is_repeated:
        target.extend(_chosen(path) or [_scalar(field, path, index) for index in range(2)])
    elif field.message_type is not None:
        target.CopyFrom(_filled(field.message_type, path, None))
        target.SetInParent()
    else:
        chosen = _chosen(path)
        setattr(message, field.name, _scalar(field, path, 0) if chosen is None else chosen)


def _chosen(path: str) -> Any:
    ends = sorted((end for end in _CHOSEN if re.search(rf"(^|\.){re.escape(end)}$", path)), key=len)
    return _CHOSEN[ends[-1]] if ends else None


def _scalar(field: FieldDescriptor, path: str, index: int) -> Any:
    number = field.number + index
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = f"{path} {index}"
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return number + 0.25
        case FieldDescriptor.CPPTYPE_ENUM:
            assert field.enum_type is not None
            return field.enum_type.values[index - 2 if field.is_repeated else -1].number
        case _:
            return 100 + number
