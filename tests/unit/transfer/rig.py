"""One publisher and one fetcher of each backend between a 2-device prefill mesh and a 4-device decode mesh."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field, replace

import grpc
import jax
import ml_dtypes
import numpy as np
from jax.experimental import transfer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdisagg.api.peer.byte_source import GrpcByteSource
from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.kv.group import KVGroup
from jdisagg.transfer.base import Fetcher, Piece, PieceArrived, PieceFailed, Published, Publisher, TransferEvent
from jdisagg.transfer.cut import Cutter, Joiner
from jdisagg.transfer.device_put import DevicePutPublisher, device_put_fetcher
from jdisagg.transfer.grpc_backend import PieceStore
from jdisagg.transfer.host_backend import host_fetcher, host_publisher
from jdisagg.transfer.jax_backend import jax_fetcher, jax_publisher
from jdisagg.transfer.jax_server import TransferServers
from jdisagg.transfer.room import Room
from jdisagg.transfer.shm_backend import ShmSource, ShmStore
from jdisagg.transfer.target import PieceTarget
from jdisagg.transfer.tcp_source import TcpSource
from jdisagg.transfer.tcp_store import TcpStore
from jdisagg.v1 import peer_pb2, peer_pb2_grpc
from tests.unit.transfer.fake import FakeFetcher, FakeNetwork, FakePublisher

LAYERS, CHUNK_TOKENS, HEADS, FEATURES = 2, 8, 4, 6
H = HandoffId("r", 1)
NP_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def sharding(first: int, size: int) -> NamedSharding:
    devices = np.array(jax.devices()[first : first + size])
    return NamedSharding(Mesh(devices, ("tp",)), PartitionSpec(None, None, "tp", None))


TARGET = PieceTarget(
    sharding=sharding(4, 4),
    dtype="float32",
    chunk_tokens=CHUNK_TOKENS,
    num_layers=LAYERS,
    num_kv_heads=HEADS,
    features=FEATURES,
)


def tokens(num_tokens: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(LAYERS, num_tokens, HEADS, FEATURES))
    return values.astype(NP_DTYPES[dtype])


def piece(values: np.ndarray, begin: int = 3, *, heads_on: int = 2) -> Piece:
    """`values` on the prefill mesh, padded with NaN along tokens as a gather may leave it."""
    padded = np.full((LAYERS, CHUNK_TOKENS, *values.shape[2:]), np.nan, values.dtype)
    padded[:, : values.shape[1]] = values
    return Piece(begin=begin, end=begin + values.shape[1], data=jax.device_put(padded, sharding(0, heads_on)))


def error_array() -> jax.Array:
    """What a dispatched computation that failed leaves: is_ready() is true, reading it raises."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    aval = jax.ShapeDtypeStruct((LAYERS, CHUNK_TOKENS, HEADS, FEATURES), np.float32, sharding=device)
    return transfer.make_error_array(aval, "injected device failure")


@functools.cache
def cutter(dtype: str, checksums: bool = True) -> Cutter:
    """Of the prefill mesh; compiled once for all tests."""
    example = jax.device_put(np.zeros((LAYERS, CHUNK_TOKENS, HEADS, FEATURES), NP_DTYPES[dtype]), sharding(0, 2))
    return Cutter([example], checksums=checksums)


@functools.cache
def joiner(dtype: str, chunk_tokens: int, heads: int) -> Joiner:
    """Of the decode mesh."""
    made = Joiner([(LAYERS, chunk_tokens, heads, FEATURES)], [NP_DTYPES[dtype]], sharding(4, 4))
    made.warm_up()
    return made


@functools.cache
def transfer_servers() -> tuple[TransferServers, TransferServers]:
    """P's and D's."""
    return TransferServers(jax.devices(), "127.0.0.1"), TransferServers(jax.devices(), "127.0.0.1")


class LocalSource:
    """A ByteSource over a PieceStore in this process, three bytes at a time."""

    def __init__(self, store: PieceStore) -> None:
        self._store = store

    def read_into(self, peer: str, key: str, room: memoryview, deadline_s: float) -> Iterator[int]:
        data = self._store.get(key)
        if data is None:
            raise KeyError(key)
        if len(data) > len(room):
            raise BufferError("too long")
        for begin in range(0, len(data), 100):
            part = data[begin : begin + 100]
            room[begin : begin + len(part)] = part
            yield len(part)


class StoreServicer(peer_pb2_grpc.PeerServiceServicer):
    """PeerService.Fetch alone."""

    def __init__(self, store: PieceStore) -> None:
        self._store = store

    def Fetch(self, request: peer_pb2.FetchRequest, context: grpc.ServicerContext) -> Iterator[peer_pb2.FetchResponse]:
        data = self._store.get(request.key)
        if data is None:
            context.abort(grpc.StatusCode.NOT_FOUND, request.key)
            return
        for begin in range(0, len(data), 100):
            yield peer_pb2.FetchResponse(data=bytes(data[begin : begin + 100]))


@dataclass
class Rig:
    """Both halves of one backend, and what they post."""

    kind: str
    peer: str = "peer"
    p_dtype: str | None = None  # None = D's
    events: queue.SimpleQueue[TransferEvent] = field(default_factory=queue.SimpleQueue)
    network: FakeNetwork = field(default_factory=FakeNetwork)
    store: PieceStore = field(default_factory=PieceStore)
    cleanups: list[Callable[[], object]] = field(default_factory=list)
    threads_before: set[threading.Thread] = field(default_factory=lambda: set(threading.enumerate()))
    publisher: Publisher = field(init=False)
    fetcher: Fetcher = field(init=False)

    def start(
        self,
        *,
        dtype: str = "float32",
        chunk_tokens: int = CHUNK_TOKENS,
        heads: int = HEADS,
        most_tokens: int | None = None,
    ) -> Rig:
        target = replace(TARGET, dtype=dtype, chunk_tokens=chunk_tokens, num_kv_heads=heads, room=Room(most_tokens))
        post = self.events.put
        match self.kind:
            case "fake":
                self.publisher = FakePublisher(self.network, post)
                self.fetcher = FakeFetcher(self.network, target, post)
            case "device_put":
                self.publisher = publisher = DevicePutPublisher(post)
                example = KVGroup(piece(tokens(CHUNK_TOKENS)).data)
                self.fetcher = device_put_fetcher(publisher, target, post, example)
            case "grpc":
                self.publisher = host_publisher("grpc", self.store, post)
                self.fetcher = host_fetcher("grpc", LocalSource(self.store), target, post)
            case "grpc-loopback":
                self.publisher = host_publisher("grpc", self.store, post)
                self.fetcher = host_fetcher("grpc", self._serve(), target, post)
            case "shm":
                self.publisher = host_publisher("shm", ShmStore(), post)
                self.fetcher = host_fetcher("shm", ShmSource(), target, post)
            case "tcp":
                self.publisher = host_publisher("tcp", TcpStore("127.0.0.1"), post)
                source = TcpSource()
                self.cleanups.append(source.close)
                self.fetcher = host_fetcher("tcp", source, target, post)
            case "jax":
                ours, theirs = transfer_servers()
                self.publisher = jax_publisher(ours, cutter(self.p_dtype or dtype), post)
                self.fetcher = jax_fetcher(theirs, joiner(dtype, chunk_tokens, heads), target, post)
        return self

    def _serve(self) -> GrpcByteSource:
        server = grpc.server(futures.ThreadPoolExecutor(2))
        peer_pb2_grpc.add_PeerServiceServicer_to_server(StoreServicer(self.store), server)
        self.peer = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        source = GrpcByteSource()
        self.cleanups += [source.close, lambda: server.stop(0).wait(5)]
        return source

    def event(self, timeout_s: float = 30.0) -> TransferEvent:
        """The next event; runs the fake's steps."""
        self.network.run()
        return self.events.get(timeout=timeout_s)

    def quiet(self, seconds: float = 0.1) -> bool:
        """Whether nothing is posted for a while."""
        self.network.run()
        time.sleep(seconds)
        return self.events.empty()

    def published(self, key: str, sent: Piece, handoff: HandoffId = H) -> ChunkReady:
        self.publisher.publish(handoff, key, sent)
        event = self.event()
        assert isinstance(event, Published), event
        assert (event.handoff, event.ready.key) == (handoff, key)
        return event.ready

    def fetch(self, ready: ChunkReady, handoff: HandoffId = H, *, within_s: float = 30.0) -> None:
        self.fetcher.fetch(handoff, self.peer, ready, time.monotonic() + within_s)

    def arrived(self, ready: ChunkReady) -> PieceArrived:
        self.fetch(ready)
        event = self.event()
        assert isinstance(event, PieceArrived), event
        return event

    def failed(self, ready: ChunkReady) -> PieceFailed:
        self.fetch(ready)
        event = self.event()
        assert isinstance(event, PieceFailed), event
        return event

    def close(self) -> None:
        """Close both halves; nothing may be left."""
        for cleanup in self.cleanups:
            cleanup()
        self.fetcher.close()
        self.publisher.close()
        assert self.publisher.num_buffered_bytes == 0
        ours = {
            thread for thread in set(threading.enumerate()) - self.threads_before
            if thread.name.startswith(("grpc-", "tcp-", "shm-", "jax-", "device_put-"))
        }  # fmt: skip
        assert not ours, f"threads left: {ours}"
