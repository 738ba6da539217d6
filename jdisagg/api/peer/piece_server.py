"""Bytes of published pieces over gRPC: all that a decode worker, which lends KV, serves of PeerService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from jdisagg.api.peer.piece_wire import FETCH, encode_part
from jdisagg.api.status_details import end_call
from jdisagg.transfer.grpc_backend import PieceStore
from jdisagg.v1 import peer_pb2, peer_pb2_grpc

FETCH_PART_BYTES = 2**19  # halves of it cost a third more time; who reads over a slow network asks for less at a time
LEAST_PART_BYTES = 2**14
STALL_TIMEOUT_S = 10.0  # for a reader that takes nothing; what it reads stays in memory until then
NO_PREFILL = "this is no prefill worker; look at --prefill, and at --advertise-host and --advertise-port of the one meant"
_KEY_SHOWN = 200  # characters


class PieceServer(peer_pb2_grpc.PeerServiceServicer):
    """Fetch alone; who calls the other methods of PeerService is told that this is no prefill worker. Add it to a server with
    `add_peer_service`."""

    def __init__(self, pieces: PieceStore | None) -> None:
        """`pieces` is None when the grpc backend is not served."""
        self._pieces = pieces

    def drain(self) -> None:
        """Nothing new is taken on from now; what only lends has nothing to refuse."""

    def send_away(self) -> None:
        """Nothing that was taken on goes on: see `drain`."""

    async def Hello(self, request: peer_pb2.HelloRequest, context: grpc.aio.ServicerContext) -> peer_pb2.HelloResponse | None:
        """Not here."""
        end_call(context, grpc.StatusCode.UNIMPLEMENTED, NO_PREFILL)

    async def Prefill(
        self, request_iterator: AsyncIterator[peer_pb2.PrefillRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """Not here."""
        end_call(context, grpc.StatusCode.UNIMPLEMENTED, NO_PREFILL)

    async def Fetch(self, request: peer_pb2.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        """The bytes of one piece in FetchResponses, as they travel, of at most 512 KiB, or less if asked; NOT_FOUND when there
        is none, DEADLINE_EXCEEDED when nothing is taken for STALL_TIMEOUT_S."""
        size = min(max(request.part_bytes, LEAST_PART_BYTES), FETCH_PART_BYTES) if request.part_bytes else FETCH_PART_BYTES
        failure = await self._send(request.key, size, context)
        if failure is not None:
            end_call(context, *failure)  # waits for a reader that stands still, and holds no piece meanwhile

    async def _send(self, key: str, part_bytes: int, context: grpc.aio.ServicerContext) -> tuple[grpc.StatusCode, str] | None:
        """The bytes, or as many as are taken; returns what went wrong."""
        found, name = None if self._pieces is None else self._pieces.get(key), key[:_KEY_SHOWN]  # a status is small
        if found is None:
            return grpc.StatusCode.NOT_FOUND, f"no piece {name!r} here: acknowledged, or its lease is over"
        await context.send_initial_metadata(())  # it would wait with the first part, and so would a status
        view = memoryview(found).cast("B")
        for begin in range(0, len(view), part_bytes):
            try:
                async with asyncio.timeout(STALL_TIMEOUT_S):
                    await context.write(encode_part(view[begin : begin + part_bytes]))
            except TimeoutError:
                return grpc.StatusCode.DEADLINE_EXCEEDED, f"piece {name!r}: nothing was taken for {STALL_TIMEOUT_S:g} s"
        return None


def add_peer_service(service: PieceServer, server: grpc.aio.Server) -> None:
    """PeerService of `service`, its Fetch past protobuf. gRPC asks registered handlers, the last of a name, then the
    others in order."""
    *_, name, method = FETCH.split("/")
    fetch = grpc.unary_stream_rpc_method_handler(service.Fetch, request_deserializer=peer_pb2.FetchRequest.FromString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {method: fetch}),))
    peer_pb2_grpc.add_PeerServiceServicer_to_server(service, server)
    if (register := getattr(server, "add_registered_method_handlers", None)) is not None:
        register(name, {method: fetch})
