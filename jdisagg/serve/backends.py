"""The transfer backends of a worker: which it offers in Hello, and their halves, from `--kv-transfer-backend`.

    auto    shm where peers are on this host, else tcp where D reaches P's port, else grpc
    grpc    grpc alone
    tcp     plain sockets on a port of P's own, falling back to grpc; `auto` without shm
    shm     shm, falling back to grpc
    jax     JAX's transfer server, falling back to grpc; both sides must ask for it

D's order of preference decides. A backend that cannot start here is not offered, and the log says why. A new one is a case of
`_publisher` and `_fetcher`, of `_hello` if there is more to say than its name, and a name in _ORDER.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import jax

from jdisagg.api.channels import Credentials, join_address
from jdisagg.api.peer.byte_source import GrpcByteSource
from jdisagg.handoff.identity import Backend
from jdisagg.kv.memory import wants_memory
from jdisagg.serve.engine_core import NO_ROOM, Core
from jdisagg.transfer.base import Fetcher, Post, Publisher
from jdisagg.transfer.buffers import Buffers
from jdisagg.transfer.choice import FetcherSet, PublisherSet
from jdisagg.transfer.cut import Cutter
from jdisagg.transfer.drill import TransferDrill
from jdisagg.transfer.grpc_backend import PieceStore
from jdisagg.transfer.head_mesh import head_shards
from jdisagg.transfer.host_backend import ByteSource, ByteStore, host_fetcher, host_publisher
from jdisagg.transfer.jax_backend import jax_fetcher, jax_publisher, joiner_of, version, warm_up_fetches
from jdisagg.transfer.jax_server import NUM_ADDRESSES, TransferServers, Unsupported
from jdisagg.transfer.shm_backend import ShmSource, ShmStore, same_host_token
from jdisagg.transfer.target import PieceTarget
from jdisagg.transfer.tcp_source import TcpSource
from jdisagg.transfer.tcp_store import TcpStore

log = logging.getLogger(__name__)
Half = TypeVar("Half", Publisher, Fetcher)

_ORDER = {
    "auto": ("shm", "tcp", "grpc"),
    "grpc": ("grpc",),
    "tcp": ("tcp", "grpc"),
    "shm": ("shm", "grpc"),
    "jax": ("jax", "grpc"),
}


class PrefillBackends:
    """P's halves, and what Hello says of them."""

    def __init__(self, core: Core, host: str, drill: TransferDrill) -> None:
        """Start them; peers reach those that listen at `host`."""
        self.store = PieceStore()  # what PeerService.Fetch reads
        self.num_executables = 0
        self._core = core
        self._host = host
        self._endpoints: dict[str, str] = {}  # of backends with a port of their own
        started = _started(core, lambda name: drill.publisher(self._publisher(name)))
        self.publishers = PublisherSet([publisher for _, publisher in started])
        self.offered = [replace(hello, endpoint=self._endpoints.get(hello.name)) for hello, _ in started]

    def _publisher(self, name: str) -> Publisher:
        match name:
            case "grpc":
                return self._carrying(name, self.store)
            case "shm":
                return self._carrying(name, ShmStore())
            case "tcp":
                store = TcpStore(self._core.config.server.host, self._host)
                self._endpoints[name] = join_address(*store.address)
                return self._carrying(name, store)
            case "jax":
                core = self._core
                servers = TransferServers(jax.local_devices(), self._host)
                cutter = Cutter(core.runner.device.empty_piece().arrays, checksums=core.config.transfer.checksums)
                self.num_executables += cutter.warm_up()
                return jax_publisher(servers, cutter, core.inbox.post)
        raise AssertionError(f"no transfer backend is called {name!r}")

    def _carrying(self, name: str, store: ByteStore) -> Publisher:
        """A publisher of bytes."""
        return host_publisher(name, store, self._core.inbox.post, checksums=self._core.config.transfer.checksums)


class DecodeBackends:
    """D's halves, what Hello says of them, and what has to be closed, in order."""

    def __init__(self, core: Core, target: PieceTarget, host: str, credentials: Credentials, drill: TransferDrill) -> None:
        """Start them, for pieces that become like `target`; see PrefillBackends."""
        self.num_executables = 0
        self._core = core
        self._target = target
        self._host = host
        self._credentials = credentials
        self._drill = drill
        self._buffers = Buffers()
        self._connected: list[GrpcByteSource | TcpSource] = []  # closed before their fetchers
        post = core.inbox.post
        started = _started(core, lambda name: drill.fetcher(partial(self._fetcher, name), post))
        self.fetcher = FetcherSet([fetcher for _, fetcher in started], post)
        self.offered = [hello for hello, _ in started]
        self.closers: list[Callable[[], None]] = [*(source.close for source in self._connected), self.fetcher.close]

    @property
    def head_shards(self) -> int:
        """In how many parts D holds the heads of a piece."""
        return head_shards(self._target.sharding, self._target.shape)

    def _fetcher(self, name: str, post: Post) -> Fetcher:
        match name:
            case "grpc":
                stall_s = self._core.config.transfer.dead_after_s
                return self._connecting(name, GrpcByteSource(self._credentials, stall_s=stall_s), post)
            case "shm":
                return self._carrying(name, ShmSource(), post)
            case "tcp":
                return self._connecting(name, TcpSource(), post)
            case "jax":
                target = self._target
                servers, joiner = TransferServers(jax.local_devices(), self._host), joiner_of(target, target.dtype)
                self.num_executables += warm_up_fetches(joiner, target)
                return jax_fetcher(servers, joiner, target, post)
        raise AssertionError(f"no transfer backend is called {name!r}")

    def _connecting(self, name: str, source: GrpcByteSource | TcpSource, post: Post) -> Fetcher:
        """A fetcher of bytes over connections: those to a peer end with its lane."""
        self._connected.append(source)
        return self._carrying(name, source, post, on_end=source.drop)

    def _carrying(
        self, name: str, source: ByteSource, post: Post, *, on_end: Callable[[str], None] = lambda peer: None
    ) -> Fetcher:
        """A fetcher of bytes."""
        return host_fetcher(name, self._drill.byte_source(source), self._target, post, self._buffers, on_end=on_end)


def _started(core: Core, start: Callable[[str], Half]) -> list[tuple[Backend, Half]]:
    """What can be started here, in order of preference, with what Hello says of it."""
    choice = core.config.transfer.kv_transfer_backend
    started: list[tuple[Backend, Half]] = []
    for name in _ORDER[choice]:
        try:
            with wants_memory(NO_ROOM):
                started.append((_hello(name), start(name)))
        except (Unsupported, OSError) as error:
            log.warning("transfer backend %s is not offered: %s", name, error)
    return started


def _hello(name: str) -> Backend:
    match name:
        case "shm":
            return Backend(name=name, version=same_host_token())  # pairs within a host
        case "jax":
            return Backend(name=name, version=version(jax.local_devices()[0].platform), num_transport_addresses=NUM_ADDRESSES)
        case _:
            return Backend(name=name)
