"""Recorded versions of the protocol: their descriptors, and what a process of that time understands of a message of today."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

V1 = Path(__file__).parent / "v1"
FIRST = V1 / "first.binpb"  # the first v1; never made again
RECORDED = V1 / "recorded.binpb"  # v1 when the messages beside it were recorded
M = TypeVar("M", bound=Message)


def read(path: Path) -> descriptor_pb2.FileDescriptorSet:
    """A recorded schema."""
    return descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes())


class Peer:
    """A process that was built with a recorded schema."""

    def __init__(self, path: Path) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in read(path).file:
            self._pool.Add(file)

    def relay(self, message: M) -> M:
        """What this process has of the message once it was read: fields and events it does not know are gone."""
        kind = message_factory.GetMessageClass(self._pool.FindMessageTypeByName(message.DESCRIPTOR.full_name))
        seen = kind.FromString(message.SerializeToString())
        seen.DiscardUnknownFields()
        return type(message).FromString(seen.SerializeToString())
