"""Bytes of published pieces over gRPC: all that a decode worker, which lends KV, serves of PeerService."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
import grpc.aio

from jdisagg.v1 import peer_pb2, peer_pb2_grpc

FETCH_PART_BYTES = 2**20


class PieceBytes(Protocol):
    """Where published bytes are kept; `jdisagg.transfer.grpc_backend.PieceStore`."""

    def get(self, key: str) -> Any | None:
        """The piece's bytes (any contiguous buffer), or None when the key is unknown or discarded."""
        ...


async def parts_of(
    pieces: PieceBytes | None, key: str, context: grpc.aio.ServicerContext
) -> AsyncIterator[peer_pb2.FetchResponse]:
    """The bytes of one piece in parts of at most 1 MiB; ends the RPC with NOT_FOUND when there is none."""
    found = None if pieces is None else pieces.get(key)
    if found is None:
        await context.abort(grpc.StatusCode.NOT_FOUND, f"no piece {key!r} here: acknowledged, or its lease is over")
    view = memoryview(found).cast("B")
    for begin in range(0, len(view), FETCH_PART_BYTES):
        yield peer_pb2.FetchResponse(data=bytes(view[begin : begin + FETCH_PART_BYTES]))


class PieceServer(peer_pb2_grpc.PeerServiceServicer):
    """Fetch alone; the other methods of PeerService are UNIMPLEMENTED here."""

    def __init__(self, pieces: PieceBytes) -> None:
        self._pieces = pieces

    async def Fetch(
        self, request: peer_pb2.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[peer_pb2.FetchResponse]:
        """The bytes of one piece."""
        async for part in parts_of(self._pieces, request.key, context):
            yield part
