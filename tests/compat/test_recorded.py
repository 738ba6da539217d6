"""Messages recorded from v1 mean today what they meant then, and what is new never changes what is old."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jdisagg.api.codec import decode_output
from jdisagg.api.peer.codec import decode_down, decode_up
from jdisagg.api.peer.identity_codec import decode_identity
from jdisagg.core.errors import RequestError
from jdisagg.core.requests import FinishReason
from jdisagg.v1 import common_pb2, peer_pb2
from tests.compat.record import fields, path_of, unrecorded
from tests.compat.samples import FILES, NOW_S, core, samples
from tests.compat.schema import FIRST, RECORDED, read

RECORDS: dict[str, dict[str, Any]] = {
    name: record | {"file": file} for file in FILES for name, record in json.loads(path_of(file).read_text()).items()
}
UNREAD = {"ranks"}  # of the core then: no version has sent it
UNKNOWN = b"\xc2\x3e\x03new" + b"\xd8\x3e\x07"  # fields 1000 (text) and 1003 (number)


def message_of(name: str) -> Message:
    record = RECORDS[name]
    kind = GetMessageClass(record["file"].message_types_by_name[name.partition(".")[0]])
    return kind.FromString(bytes.fromhex(record["wire"]))


def assert_includes(found: Any, recorded: Any, where: str) -> None:
    """Everything recorded is there, equal; objects may have got more fields since."""
    if isinstance(recorded, dict):
        assert isinstance(found, dict), where
        for key, value in recorded.items():
            assert key in found, f"{where}.{key} is gone"
            assert_includes(found[key], value, f"{where}.{key}")
    elif isinstance(recorded, list):
        assert isinstance(found, list), where
        assert len(found) == len(recorded), where
        for index, (one, other) in enumerate(zip(found, recorded, strict=True)):
            assert_includes(one, other, f"{where}[{index}]")
    else:
        assert found == recorded, where


def still_read(recorded: Any) -> Any:
    return {key: value for key, value in recorded.items() if key not in UNREAD} if isinstance(recorded, dict) else recorded


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_recorded_bytes_have_the_fields_and_the_core_value_they_had(name: str) -> None:
    record, message = RECORDS[name], message_of(name)
    assert_includes(fields(message), record["fields"], name)
    assert fields(message).keys() == record["fields"].keys(), "bytes of then set no field of today"
    assert_includes(core(name, message), still_read(record["core"]), name)


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_unknown_fields_change_nothing(name: str) -> None:
    known = message_of(name)
    newer = type(known).FromString(known.SerializeToString() + UNKNOWN)
    assert core(name, newer) == core(name, known)
    assert fields(newer) == fields(known)


def test_every_message_of_today_is_recorded() -> None:
    missing = [key for file in FILES for sample in samples(file) if (key := unrecorded(*sample, RECORDS)) is not None]
    assert missing == [], "run python -m tests.compat.record"


@pytest.mark.parametrize("path", [FIRST, RECORDED], ids=["first", "recorded"])
def test_today_is_what_was_and_more(path: Any) -> None:
    today = {file.name: as_proto(file) for file in FILES}
    old = {file.name: file for file in read(path).file if file.name in today}
    assert old.keys() == today.keys()
    for name, file in old.items():
        new = today[name]
        assert parts(file) <= parts(new), f"{name}: {sorted(parts(file) - parts(new))} changed or went; v1 only grows"


def as_proto(file: FileDescriptor) -> descriptor_pb2.FileDescriptorProto:
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    return proto


def parts(file: descriptor_pb2.FileDescriptorProto) -> set[tuple[Any, ...]]:
    """What two processes must agree on: fields by number and type, values of enums, methods."""
    found: set[tuple[Any, ...]] = set()
    for message in (*file.message_type, *(inner for outer in file.message_type for inner in outer.nested_type)):
        for field in message.field:
            choice = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
            found.add((message.name, field.name, field.number, field.type, field.label, field.type_name, choice))
    for enum in file.enum_type:
        found |= {(enum.name, value.name, value.number) for value in enum.value}
    for service in file.service:
        for method in service.method:
            streams = (method.client_streaming, method.server_streaming)
            found.add((service.name, method.name, method.input_type, method.output_type, *streams))
    return found


def test_unknown_numbers_and_events_have_a_stated_meaning() -> None:
    ended = common_pb2.Output.FromString(common_pb2.Output(request_id="r").SerializeToString() + b"\x30\x4d")  # finish = 77
    assert decode_output(ended).finish is FinishReason.ERROR
    failed = common_pb2.Output(request_id="r", finish=4, error=common_pb2.RequestFailure(code=999, message="odd"))
    error = decode_output(failed).error
    assert type(error) is RequestError  # INTERNAL
    later = b"\xa2\x06\x02\x08\x01"  # field 100 of the message: an event of a later version
    assert decode_down(peer_pb2.PrefillRequest.FromString(later), NOW_S) is None  # as a heartbeat: it shows life
    assert decode_up(peer_pb2.PrefillResponse.FromString(later)) is None
    group = decode_identity(peer_pb2.Identity(groups=[peer_pb2.CacheGroup(num_layers=1)])).groups[0]
    assert (group.spec.kind, group.spec.window) == ("full", None)
