"""Records what is not recorded yet: `python -m tests.compat.record`.

v1/FILE.json holds, for each message of FILE.proto: its bytes (hexadecimal), its fields, and what the core made of them. An
entry that exists is history and stays as it is; a message that has got more fields, its own or of a message in it, is recorded
again beside it, as NAME.2 and so on. `recorded.binpb`, the schema, is
written anew: commit it only when it grew. `first.binpb` is the schema of the first v1 and never changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from tests.compat.samples import FILES, core, samples
from tests.compat.schema import RECORDED, V1


def fields(message: Message) -> dict[str, object]:
    """The message's own fields by name."""
    return MessageToDict(message, preserving_proto_field_name=True)


def path_of(file: FileDescriptor) -> Path:
    """Where messages of that .proto are recorded."""
    return V1 / f"{Path(file.name).stem}.json"


def unrecorded(name: str, message: Message, records: Mapping[str, Any]) -> str | None:
    """The free key under which to record `message`, or None: it is recorded as it is today."""
    key, number = name, 1
    while key in records:
        if records[key]["fields"] == fields(message):
            return None
        number += 1
        key = f"{name}.{number}"
    return key


def main() -> None:
    """Write what is missing, and say what that was."""
    schema = descriptor_pb2.FileDescriptorSet()
    for file in FILES:
        path = path_of(file)
        records = json.loads(path.read_text()) if path.exists() else {}
        for name, message in samples(file):
            if (key := unrecorded(name, message, records)) is not None:
                wire = message.SerializeToString(deterministic=True).hex()
                records[key] = {"wire": wire, "fields": fields(message), "core": core(name, message)}
                print(f"recorded {key}")
        path.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
        file.CopyToProto(schema.file.add())
    RECORDED.write_bytes(schema.SerializeToString(deterministic=True))


if __name__ == "__main__":
    main()
