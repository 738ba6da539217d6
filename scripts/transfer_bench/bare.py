"""What the libraries give by themselves: bytes through gRPC's Python stream, arrays through JAX's transfer server, with nothing
of ours around them. No backend built on one of them can do better."""

from __future__ import annotations

import asyncio
import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import grpc
import grpc.aio
import jax
import numpy as np

from jdisagg.api.channels import bind, make_server, open_blocking_channel
from jdisagg.api.peer.piece_server import FETCH_PART_BYTES
from jdisagg.transfer.jax_server import COPY_BYTES, TransferServer
from transfer_bench.consumer import Moved
from transfer_bench.parts import HOST, cpu_s

_SERVICE, _METHOD = "bench.Bare", "Read"
START_S = 60.0


class _Bare(ABC):
    """A producer in a process of its own, which is asked for its CPU seconds with None and for anything else by `_obtain`."""

    def __init__(self, piece_bytes: int, produce: Callable[[int, Connection], None]) -> None:
        self._piece_bytes = piece_bytes
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=produce, args=(piece_bytes, theirs), daemon=True)
        self._process.start()
        if not self._pipe.poll(START_S):
            raise RuntimeError(f"the producer did not start within {START_S:g} s")
        self._address: str = self._pipe.recv()

    def _ask(self, what: Any) -> Any:
        self._pipe.send(what)
        return self._pipe.recv()

    @abstractmethod
    def _obtain(self, num_pieces: int) -> None: ...

    def move(self, num_pieces: int) -> Moved:
        """Get so many pieces."""
        before_p_s, before_d_s, began_s = self._ask(None), cpu_s(), perf_counter()
        self._obtain(num_pieces)
        seconds, cpu_d_s = perf_counter() - began_s, cpu_s() - before_d_s
        return Moved(num_pieces * self._piece_bytes, seconds, self._ask(None) - before_p_s, cpu_d_s)

    def close(self) -> None:
        """End the producer."""
        self._process.kill()
        self._process.join(10)


def _serve_grpc(piece_bytes: int, pipe: Connection) -> None:
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
            pipe.send(cpu_s())

    asyncio.run(serve())


class BareGrpc(_Bare):
    """Messages of the size that PeerService.Fetch sends, received one by one into one buffer a piece."""

    def __init__(self, piece_bytes: int) -> None:
        super().__init__(piece_bytes, _serve_grpc)
        self._channel = open_blocking_channel(self._address)

    def _obtain(self, num_pieces: int) -> None:
        room, filled = np.empty(self._piece_bytes, np.uint8).data, 0
        for part in self._channel.unary_stream(f"/{_SERVICE}/{_METHOD}")(str(num_pieces).encode()):
            room[filled : filled + len(part)] = part
            filled = (filled + len(part)) % self._piece_bytes

    def close(self) -> None:
        """End both."""
        self._channel.close()
        super().close()


def _serve_jax(piece_bytes: int, pipe: Connection) -> None:
    server = TransferServer(jax.devices(), HOST)
    piece = jax.block_until_ready([jax.numpy.zeros(size, np.uint8) for size in _slab_sizes(piece_bytes)])
    pipe.send(server.address)
    while True:
        pipe.send(cpu_s() if pipe.recv() is None else server.offer(piece))


def _slab_sizes(piece_bytes: int) -> list[int]:
    """As a backend cuts a piece: none takes two copies."""
    whole, rest = divmod(piece_bytes, COPY_BYTES)
    return [COPY_BYTES] * whole + [rest] * bool(rest)


class BareJax(_Bare):
    """Slabs of a piece, one pull a piece, one after the other."""

    def __init__(self, piece_bytes: int) -> None:
        super().__init__(piece_bytes, _serve_jax)
        self._server = TransferServer(jax.devices(), HOST)
        self._connection = self._server.connect(self._address)

    def _obtain(self, num_pieces: int) -> None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        specs = [jax.ShapeDtypeStruct((size,), np.uint8, sharding=device) for size in _slab_sizes(self._piece_bytes)]
        for _ in range(num_pieces):
            jax.block_until_ready(self._connection.pull(self._ask("offer"), specs))
