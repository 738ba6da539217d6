"""`FetchResponse` as it travels, without the two copies that protobuf makes of its bytes on either side.

    0x0a | length as a varint | data            field 1, bytes; exactly what protobuf writes

Who reads it with protobuf, or writes it so, notices nothing.
"""

from __future__ import annotations

from jdisagg.v1 import peer_pb2

FETCH = "/jdisagg.v1.PeerService/Fetch"
_DATA_FIELD = 0x0A


def encode_part(data: memoryview) -> bytes:
    """A FetchResponse with these bytes."""
    head, length = bytearray((_DATA_FIELD,)), len(data)
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return b"".join((head, data))


def decode_part(message: bytes) -> memoryview:
    """The bytes of a FetchResponse. Raises google.protobuf.message.DecodeError when it is none."""
    if message[:1] == bytes((_DATA_FIELD,)):
        length = shift = 0
        for at in range(1, min(len(message), 6)):
            length |= (message[at] & 0x7F) << shift
            shift += 7
            if message[at] <= 0x7F:
                if at + 1 + length == len(message):  # nothing but the field we know
                    return memoryview(message)[at + 1 :]
                break
    return memoryview(peer_pb2.FetchResponse.FromString(message).data)
