"""The yardsticks: bytes through a plain TCP socket, through gRPC's Python stream, arrays through JAX's transfer server, each
from a process of its own and with nothing of ours around them, and a copy within one process. No backend built on a library
can do better than it."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from time import perf_counter, process_time
from typing import Any

import grpc
import grpc.aio
import jax
import numpy as np
from bench_kit.child import child

from jdisagg.api.channels import bind, make_server, open_blocking_channel
from jdisagg.api.peer.piece_server import FETCH_PART_BYTES
from jdisagg.transfer.jax_server import COPY_BYTES, TransferServer
from transfer_bench.consumer import Moved
from transfer_bench.parts import HOST

SOCKET_BUFFER_BYTES = 2**20
_SERVICE, _METHOD = "bench.Bare", "Read"


class Bare(ABC):
    """A producer in a process of its own, which is asked for its CPU seconds with None and for anything else by `_obtain`."""

    def __init__(self, piece_bytes: int, produce: Callable[[Connection, int], None]) -> None:
        self._piece_bytes = piece_bytes
        self._open = ExitStack()
        self._producer, self._address = self._open.enter_context(child(produce, piece_bytes))

    @abstractmethod
    def _obtain(self, num_pieces: int) -> None: ...

    def move(self, num_pieces: int) -> Moved:
        """Get so many pieces."""
        before_p_s, before_d_s, began_s = self._producer.ask(None), process_time(), perf_counter()
        self._obtain(num_pieces)
        seconds, cpu_d_s = perf_counter() - began_s, process_time() - before_d_s
        return Moved(num_pieces * self._piece_bytes, seconds, self._producer.ask(None) - before_p_s, cpu_d_s)

    def close(self) -> None:
        """End both ends."""
        self._open.close()


def _serve_tcp(pipe: Connection, piece_bytes: int) -> None:
    piece = memoryview(np.random.default_rng(0).integers(0, 255, piece_bytes, np.uint8).data)
    with socket.create_server((HOST, 0)) as server:
        pipe.send(server.getsockname())
        connection, _ = server.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        while True:
            if (num_pieces := pipe.recv()) is None:
                pipe.send(process_time())
            else:
                for _ in range(num_pieces):
                    connection.sendall(piece)


class RawTcp(Bare):
    """Every piece is received into a fresh buffer."""

    def __init__(self, piece_bytes: int) -> None:
        super().__init__(piece_bytes, _serve_tcp)
        self._socket = self._open.enter_context(socket.create_connection(self._address))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)

    def _obtain(self, num_pieces: int) -> None:
        self._producer.tell(num_pieces)
        for _ in range(num_pieces):
            view = np.empty(self._piece_bytes, np.uint8).data
            while view:
                if not (num_bytes := self._socket.recv_into(view)):
                    raise ConnectionError("the producer is gone")
                view = view[num_bytes:]


def _serve_grpc(pipe: Connection, piece_bytes: int) -> None:
    part = bytes(min(piece_bytes, FETCH_PART_BYTES))

    async def read(request: bytes, context: grpc.aio.ServicerContext) -> Any:
        for _ in range(int(request) * piece_bytes // len(part)):
            yield part

    async def serve() -> None:
        server = make_server()
        handler = grpc.unary_stream_rpc_method_handler(read)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
        pipe.send(bind(server, HOST))
        await server.start()
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send(process_time())

    asyncio.run(serve())


class BareGrpc(Bare):
    """Messages of the size that PeerService.Fetch sends, received one by one into one buffer a piece."""

    def __init__(self, piece_bytes: int) -> None:
        super().__init__(piece_bytes, _serve_grpc)
        self._channel = self._open.enter_context(open_blocking_channel(self._address))

    def _obtain(self, num_pieces: int) -> None:
        room, filled = np.empty(self._piece_bytes, np.uint8).data, 0
        for part in self._channel.unary_stream(f"/{_SERVICE}/{_METHOD}")(str(num_pieces).encode()):
            room[filled : filled + len(part)] = part
            filled = (filled + len(part)) % self._piece_bytes


def _serve_jax(pipe: Connection, piece_bytes: int) -> None:
    server = TransferServer(jax.devices(), HOST)
    piece = jax.block_until_ready([jax.numpy.zeros(size, np.uint8) for size in _slab_sizes(piece_bytes)])
    pipe.send(server.address)
    while True:
        pipe.send(process_time() if pipe.recv() is None else server.offer(piece))


def _slab_sizes(piece_bytes: int) -> list[int]:
    """As a backend cuts a piece: none takes two copies."""
    whole, rest = divmod(piece_bytes, COPY_BYTES)
    return [COPY_BYTES] * whole + [rest] * bool(rest)


class BareJax(Bare):
    """Slabs of a piece, one pull a piece, one after the other."""

    def __init__(self, piece_bytes: int) -> None:
        super().__init__(piece_bytes, _serve_jax)
        self._server = TransferServer(jax.devices(), HOST)
        self._connection = self._server.connect(self._address)

    def _obtain(self, num_pieces: int) -> None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        specs = [jax.ShapeDtypeStruct((size,), np.uint8, sharding=device) for size in _slab_sizes(self._piece_bytes)]
        for _ in range(num_pieces):
            jax.block_until_ready(self._connection.pull(self._producer.ask("offer"), specs))


def memcpy(piece_bytes: int, num_pieces: int) -> Moved:
    """Copy so many pieces into fresh buffers."""
    piece = np.random.default_rng(0).integers(0, 255, piece_bytes, np.uint8)
    before_s, began_s = process_time(), perf_counter()
    for _ in range(num_pieces):
        piece.copy()
    return Moved(num_pieces * piece_bytes, perf_counter() - began_s, 0.0, process_time() - before_s)
