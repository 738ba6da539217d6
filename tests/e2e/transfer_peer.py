"""`python -m tests.e2e.transfer_peer`: one half of a transfer in a process of its own, led by JSON lines on stdin.

A line is `{"do": NAME, ...}`; the answer is one line with what the method NAME of `Half` returned. Both halves of a pair are
such processes. Pieces are `[2, tokens, 8, features]` of numbers made from a seed, so each side can say what they must be.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import json
import os
import queue
import sys
import time
from concurrent import futures
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdisagg.api.peer.byte_source import GrpcByteSource
from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.transfer import jax_server, tcp_source
from jdisagg.transfer.base import Fetcher, Piece, PieceArrived, PieceFailed, Published, Publisher, TransferEvent
from jdisagg.transfer.buffers import Buffers
from jdisagg.transfer.cut import Cutter, Joiner
from jdisagg.transfer.grpc_backend import PieceStore
from jdisagg.transfer.host_backend import host_fetcher, host_publisher
from jdisagg.transfer.jax_backend import jax_fetcher, jax_publisher
from jdisagg.transfer.jax_server import TransferServers
from jdisagg.transfer.lanes import LaneFetcher
from jdisagg.transfer.shm_backend import ShmSource, ShmStore
from jdisagg.transfer.target import PieceTarget
from jdisagg.transfer.tcp_source import TcpSource
from jdisagg.transfer.tcp_store import TcpStore
from jdisagg.v1 import peer_pb2, peer_pb2_grpc

LAYERS, HEADS = 2, 8
PART_BYTES = 2**20
SHORT_OFFER_S = 6.0  # what is never pulled is to be gone within a test
PATIENT_S = 10.0  # without a byte: the other process may stand still
NP_DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def sharding(tp: int) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:tp]), ("tp",)), PartitionSpec(None, None, "tp", None))


@functools.lru_cache(maxsize=64)
def values(seed: int, tokens: int, features: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((LAYERS, tokens, HEADS, features), np.float32).astype(NP_DTYPES[dtype])


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


class Fetches(peer_pb2_grpc.PeerServiceServicer):
    """PeerService.Fetch over a store."""

    def __init__(self, store: PieceStore) -> None:
        self._store = store

    def Fetch(self, request: peer_pb2.FetchRequest, context: grpc.ServicerContext) -> Any:
        data = self._store.get(request.key)
        if data is None:
            context.abort(grpc.StatusCode.NOT_FOUND, request.key)
            return
        for begin in range(0, len(data), PART_BYTES):
            yield peer_pb2.FetchResponse(data=bytes(data[begin : begin + PART_BYTES]))


class Half:
    """A publisher or a fetcher, and what it posted."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        self.publisher: Publisher | None = None
        self.fetcher: Fetcher | None = None
        self.buffers = Buffers()
        self.store = PieceStore()
        self.sources: list[GrpcByteSource | TcpSource] = []
        self.form: dict[str, Any] = {}
        self._server: grpc.Server | None = None
        self.peer = f"process-{os.getpid()}"

    # --- making

    @functools.cached_property
    def transfer(self) -> TransferServers:
        return TransferServers(jax.devices(), "127.0.0.1")

    @functools.cache  # noqa: B019
    def cutter(self, tp: int, dtype: str, chunk: int, features: int, checksums: bool) -> Cutter:
        example = jax.device_put(np.zeros((LAYERS, chunk, HEADS, features), NP_DTYPES[dtype]), sharding(tp))
        return Cutter([example], checksums=checksums)

    @functools.cache  # noqa: B019
    def joiner(self, tp: int, dtype: str, chunk: int, features: int) -> Joiner:
        made = Joiner([(LAYERS, chunk, HEADS, features)], [NP_DTYPES[dtype]], sharding(tp))
        made.warm_up()
        return made

    def produce(
        self, *, backend: str, tp: int, dtype: str, chunk: int, features: int, checksums: bool = True
    ) -> dict[str, Any]:
        """Become a producer with this backend."""
        self.close()
        self.form = {"tp": tp, "dtype": dtype, "chunk": chunk, "features": features}
        post = self.events.put
        if backend == "jax":
            cutter = self.cutter(tp, dtype, chunk, features, checksums)
            self.publisher = jax_publisher(self.transfer, cutter, post)
        elif backend == "shm":
            self.publisher = host_publisher(backend, ShmStore(), post, checksums=checksums)
        elif backend == "tcp":
            store = TcpStore("127.0.0.1")
            self.publisher = host_publisher(backend, store, post, checksums=checksums)
        else:
            self.store = PieceStore()
            self.publisher = host_publisher(backend, self.store, post, checksums=checksums)
            self._server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
            peer_pb2_grpc.add_PeerServiceServicer_to_server(Fetches(self.store), self._server)
            self.peer = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
            self._server.start()
        return {"peer": self.peer}

    def consume(self, *, backend: str, tp: int, dtype: str, chunk: int, features: int) -> dict[str, Any]:
        """Become a consumer with this backend."""
        self.close()
        target = PieceTarget(
            sharding=sharding(tp), dtype=dtype, chunk_tokens=chunk, num_layers=LAYERS, num_kv_heads=HEADS, features=features
        )
        post = self.events.put
        if backend == "jax":
            self.fetcher = jax_fetcher(self.transfer, self.joiner(tp, dtype, chunk, features), target, post)
        elif backend == "shm":
            self.fetcher = host_fetcher(backend, ShmSource(), target, post, self.buffers)
        else:
            self.sources = [TcpSource() if backend == "tcp" else GrpcByteSource(stall_s=PATIENT_S)]
            self.fetcher = host_fetcher(backend, self.sources[0], target, post, self.buffers)
        return {}

    def close(self) -> dict[str, Any]:
        """End both halves; what was posted and not read is dropped."""
        for source in self.sources:
            source.close()
        if self._server is not None:
            self._server.stop(0).wait(5)
        for half in (self.fetcher, self.publisher):
            if half is not None:
                half.close()
        buffered = 0 if self.publisher is None else self.publisher.num_buffered_bytes
        self.sources, self._server, self.fetcher, self.publisher = [], None, None, None
        while not self.events.empty():
            self.events.get()
        return {"buffered": buffered}

    # --- moving

    def publish(self, key: str, seed: int, tokens: int, head_shards: int = 1, receiver: str = "") -> dict[str, Any]:
        """Publish one piece and wait for the answer."""
        assert self.publisher is not None
        padded = np.full((LAYERS, self.form["chunk"], HEADS, self.form["features"]), np.nan, NP_DTYPES[self.form["dtype"]])
        padded[:, :tokens] = values(seed, tokens, self.form["features"], self.form["dtype"])
        data = jax.device_put(padded, sharding(self.form["tp"]))
        piece = Piece(begin=0, end=tokens, data=data, head_shards=head_shards, receiver=receiver)
        self.publisher.publish(HandoffId(key, 1), key, piece)
        event = self._answer_to(key)
        if isinstance(event, Published):
            return {"ready": asdict(event.ready)}
        return {"failed": getattr(event, "reason", repr(event))}

    def _answer_to(self, key: str) -> TransferEvent:
        """Drops answers to pieces that were discarded as they came."""
        while True:
            event = self.events.get(timeout=20)
            if key == (event.ready.key if isinstance(event, Published) else getattr(event, "key", key)):
                return event

    def offers_last(self, seconds: float = SHORT_OFFER_S) -> dict[str, Any]:
        """From now on."""
        jax_server.OFFER_S = seconds
        return {}

    def discard(self, keys: list[str]) -> dict[str, Any]:
        assert self.publisher is not None
        for key in keys:
            self.publisher.discard(key)
        return {"buffered": self.publisher.num_buffered_bytes}

    def spoil(self, key: str) -> dict[str, Any]:
        """Flip one bit of a stored piece of the grpc backend."""
        data = bytearray(self.store._bytes[key])
        data[len(data) // 2] ^= 4
        self.store._bytes[key] = bytes(data)
        return {}

    def fetch(self, ready: dict[str, Any], peer: str, within_s: float = 10.0, handoff: str = "r") -> dict[str, Any]:
        """Start a fetch."""
        assert self.fetcher is not None
        announced = ChunkReady(**(ready | {"shape": tuple(ready["shape"])}))
        self.fetcher.fetch(HandoffId(handoff, 1), peer, announced, time.monotonic() + within_s)
        return {}

    def cancel(self, handoff: str = "r") -> dict[str, Any]:
        assert self.fetcher is not None
        self.fetcher.cancel(HandoffId(handoff, 1))
        return {}

    def event(self, timeout_s: float = 15.0) -> dict[str, Any]:
        """The next result of a fetch, in words."""
        try:
            event = self.events.get(timeout=timeout_s)
        except queue.Empty:
            return {"nothing": True}
        if isinstance(event, PieceArrived):
            tokens = event.ready.end - event.ready.begin
            data = event.piece.data
            whole = np.asarray(data)
            return {
                "key": event.ready.key,
                "digest": digest(whole[:, :tokens]),
                "padding": int(np.count_nonzero(whole[:, tokens:].view(np.uint8))),
                "devices": len(data.sharding.device_set),
                "shard_heads": data.sharding.shard_shape(data.shape)[2],
            }
        assert isinstance(event, PieceFailed)
        return {"key": event.ready.key, "failed": event.reason, "detail": event.detail}

    def drain(self) -> dict[str, Any]:
        """Drop what was posted."""
        while not self.events.empty():
            self.events.get()
        return {}

    def settle(self) -> dict[str, Any]:
        """Wait for every fetch, then drop what was posted."""
        assert isinstance(self.fetcher, LaneFetcher)
        end_s = time.monotonic() + 10.0
        while self.fetcher._unfinished() and time.monotonic() < end_s:
            time.sleep(0.01)
        return self.drain() | {"jobs": len(self.fetcher._unfinished())}

    def churn(self, count: int, tokens: int, first: int = 0) -> dict[str, Any]:
        """Publish and abandon `count` pieces; every other one before it was ready."""
        assert self.publisher is not None
        for index in range(first, first + count):
            key = f"churn-{index}"
            data = jax.device_put(
                np.full((LAYERS, self.form["chunk"], HEADS, self.form["features"]), index, NP_DTYPES[self.form["dtype"]]),
                sharding(self.form["tp"]),
            )
            self.publisher.publish(HandoffId(key, 1), key, Piece(begin=0, end=tokens, data=data))
            if index % 2:
                self.events.get(timeout=20)
            self.publisher.discard(key)
        time.sleep(0.1)
        while not self.events.empty():
            self.events.get()
        return {"buffered": self.publisher.num_buffered_bytes}

    # --- looking

    def expect(self, seed: int, tokens: int, features: int, dtype: str) -> dict[str, Any]:
        return {"digest": digest(values(seed, tokens, features, dtype))}

    def look(self) -> dict[str, Any]:
        """What the process holds of the system, once what is kept for later is given back."""
        gc.collect()
        self.buffers._idle.clear()
        ctypes.CDLL(None).malloc_trim(0)
        status = Path("/proc/self/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
        return {
            "rss": int(resident.split()[1]) * 1024,
            "threads": len([name for name in names if not name.startswith(("event_engine", "grpc"))]),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "shm": sorted(name for name in os.listdir("/dev/shm") if "jdisagg" in name),
        }


def main() -> None:
    jax_server.OFFER_S, tcp_source.STALL_TIMEOUT_S = SHORT_OFFER_S, PATIENT_S
    half = Half()
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(half, order.pop("do"))(**order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
