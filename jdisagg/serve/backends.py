"""The transfer backends of a worker: which it offers in Hello, and their halves, from `--kv-transfer-backend`.

    auto    shm where peers are on this host, else tcp where D reaches P's port, else grpc
    grpc    grpc alone
    tcp     plain sockets on a port of P's own, falling back to grpc; `auto` without shm
    shm     shm, falling back to grpc
    jax     JAX's transfer server, falling back to grpc; both sides must ask for it

D's order of preference decides. A backend that cannot start here is not offered, and the log says why; `auto` leaves tcp out
without a word where connections are encrypted. A new one is a row in _KINDS and, where it is to be tried, a name in _ORDER.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import jax

from jdisagg.api.byte_source import GrpcByteSource
from jdisagg.api.channels import Credentials, join_address
from jdisagg.handoff.identity import Backend
from jdisagg.serve.engines import Core
from jdisagg.transfer.base import Fetcher, Post, Publisher
from jdisagg.transfer.buffers import Buffers
from jdisagg.transfer.choice import FetcherSet, PublisherSet
from jdisagg.transfer.cut import Cutter
from jdisagg.transfer.drill import TransferDrill
from jdisagg.transfer.grpc_backend import PieceStore
from jdisagg.transfer.head_mesh import head_shards
from jdisagg.transfer.host_backend import ByteSource, ByteStore, host_fetcher, host_publisher
from jdisagg.transfer.jax_backend import VERSION as JAX_VERSION
from jdisagg.transfer.jax_backend import jax_fetcher, jax_publisher, joiner_of, warm_up_fetches
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


@dataclass(kw_only=True)
class PrefillBackends:
    """P's halves, and what Hello says of them."""

    core: Core
    host: str  # where peers reach those that listen
    credentials: Credentials
    drill: TransferDrill
    store: PieceStore = field(default_factory=PieceStore)  # what PeerService.Fetch reads
    offered: list[Backend] = field(default_factory=list)
    endpoints: dict[str, str] = field(default_factory=dict)  # of backends with a port of their own
    num_executables: int = 0
    publishers: PublisherSet = field(init=False)

    def carrying(self, name: str, store: ByteStore) -> Publisher:
        """A publisher of bytes."""
        config = self.core.config.transfer
        max_bytes, checksums = config.transfer_buffer_bytes, config.checksums
        return host_publisher(name, store, self.core.inbox.post, max_bytes=max_bytes, checksums=checksums)


@dataclass(kw_only=True)
class DecodeBackends:
    """D's halves, what Hello says of them, and what has to be closed, in order."""

    core: Core
    target: PieceTarget
    host: str
    credentials: Credentials
    drill: TransferDrill
    offered: list[Backend] = field(default_factory=list)
    closers: list[Callable[[], None]] = field(default_factory=list)
    droppers: list[Callable[[str], None]] = field(default_factory=list)
    buffers: Buffers = field(default_factory=Buffers)
    num_executables: int = 0
    fetcher: FetcherSet = field(init=False)

    @property
    def head_shards(self) -> int:
        """In how many parts D holds the heads of a piece."""
        return head_shards(self.target.sharding, self.target.shape)

    def on_down(self, peer: str) -> None:
        """A peer's connection was given up."""
        for drop in self.droppers:
            drop(peer)

    def carrying(self, name: str, source: ByteSource) -> Callable[[Post], Fetcher]:
        """A fetcher of bytes."""
        return partial(host_fetcher, name, self.drill.byte_source(source), self.target, buffers=self.buffers)

    def connected(self, source: GrpcByteSource | TcpSource) -> ByteSource:
        """One with connections: a read from a dead peer ends with them."""
        self.closers.append(source.close)
        self.droppers.append(source.drop)
        return source


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """One backend: its halves, and what Hello says. All may raise Unsupported and OSError."""

    publisher: Callable[[PrefillBackends], Publisher]
    fetcher: Callable[[DecodeBackends], Callable[[Post], Fetcher]]
    hello: Callable[[], Backend]


def _grpc_source(halves: DecodeBackends) -> GrpcByteSource:
    return GrpcByteSource(halves.credentials, stall_s=halves.core.config.transfer.dead_after_s)


def _publish_tcp(halves: PrefillBackends) -> Publisher:
    _check_plain(halves.credentials)
    store = TcpStore(halves.core.config.server.host, halves.host)
    halves.endpoints["tcp"] = join_address(*store.address)
    return halves.carrying("tcp", store)


def _fetch_tcp(halves: DecodeBackends) -> Callable[[Post], Fetcher]:
    _check_plain(halves.credentials)
    return halves.carrying("tcp", halves.connected(TcpSource()))


def _publish_jax(halves: PrefillBackends) -> Publisher:
    core, config = halves.core, halves.core.config.transfer
    servers = TransferServers(jax.local_devices(), halves.host)
    cutter = Cutter(core.runner.device.empty_piece().arrays, checksums=config.checksums)
    halves.num_executables += cutter.warm_up()
    return jax_publisher(servers, cutter, core.inbox.post, max_bytes=config.transfer_buffer_bytes)


def _fetch_jax(halves: DecodeBackends) -> Callable[[Post], Fetcher]:
    target = halves.target
    servers = TransferServers(jax.local_devices(), halves.host)
    joiner = joiner_of(target, target.dtype)
    halves.num_executables += warm_up_fetches(joiner, target)
    return partial(jax_fetcher, servers, joiner, target)


_KINDS = {
    "grpc": _Kind(
        publisher=lambda halves: halves.carrying("grpc", halves.store),
        fetcher=lambda halves: halves.carrying("grpc", halves.connected(_grpc_source(halves))),
        hello=lambda: Backend(name="grpc"),
    ),
    "shm": _Kind(
        publisher=lambda halves: halves.carrying("shm", ShmStore()),
        fetcher=lambda halves: halves.carrying("shm", ShmSource()),
        hello=lambda: Backend(name="shm", version=same_host_token()),  # pairs within a host
    ),
    "tcp": _Kind(publisher=_publish_tcp, fetcher=_fetch_tcp, hello=lambda: Backend(name="tcp")),
    "jax": _Kind(
        publisher=_publish_jax,
        fetcher=_fetch_jax,
        hello=lambda: Backend(name="jax", version=JAX_VERSION, num_transport_addresses=NUM_ADDRESSES),
    ),
}


def prefill_backends(core: Core, host: str, credentials: Credentials, drill: TransferDrill) -> PrefillBackends:
    """Start P's halves; peers reach those that listen at `host`."""
    halves = PrefillBackends(core=core, host=host, credentials=credentials, drill=drill)
    publishers = _started(halves, lambda kind: drill.publisher(kind.publisher(halves)))
    halves.offered = [replace(offer, endpoint=halves.endpoints.get(offer.name)) for offer in halves.offered]
    halves.publishers = PublisherSet(publishers)
    return halves


def decode_backends(
    core: Core, target: PieceTarget, host: str, credentials: Credentials, drill: TransferDrill
) -> DecodeBackends:
    """Start D's halves for pieces that become like `target`."""
    halves, post = DecodeBackends(core=core, target=target, host=host, credentials=credentials, drill=drill), core.inbox.post
    halves.fetcher = FetcherSet(_started(halves, lambda kind: drill.fetcher(kind.fetcher(halves), post)), post)
    halves.closers.append(halves.fetcher.close)
    return halves


def _started(halves: PrefillBackends | DecodeBackends, start: Callable[[_Kind], Half]) -> list[Half]:
    """What can be started here, in order of preference; Hello will offer it."""
    started: list[Half] = []
    for name in _wanted(halves.core.config.transfer.kv_transfer_backend, halves.credentials):
        try:
            backend = _KINDS[name].hello()
            started.append(start(_KINDS[name]))
        except (Unsupported, OSError) as error:
            log.warning("transfer backend %s is not offered: %s", name, error)
            continue
        halves.offered.append(backend)
    return started


def _wanted(choice: str, credentials: Credentials) -> tuple[str, ...]:
    """Backends to start, in order of preference."""
    if choice == "auto" and _encrypts(credentials):
        return tuple(name for name in _ORDER[choice] if name != "tcp")
    return _ORDER[choice]


def _check_plain(credentials: Credentials) -> None:
    if _encrypts(credentials):
        raise Unsupported("it sends KV as it is, and this worker encrypts")


def _encrypts(credentials: Credentials) -> bool:
    return credentials.channel is not None or credentials.server is not None
