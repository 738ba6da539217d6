"""Reading to the end: a piece's bytes as a fetcher does, a call as its client does."""

from __future__ import annotations

import grpc

from jdisagg.transfer.host_backend import ByteSource

ROOM_BYTES = 2**24


def read_whole(source: ByteSource, peer: str, key: str, deadline_s: float, *, room_bytes: int = ROOM_BYTES) -> bytes:
    """All of it; it may have `room_bytes`."""
    room = memoryview(bytearray(room_bytes))
    return bytes(room[: sum(source.read_into(peer, key, room, deadline_s))])


async def read_on(call: grpc.aio.Call) -> None:
    """Everything that is still to come."""
    while await call.read() is not grpc.aio.EOF:
        pass
