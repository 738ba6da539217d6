"""The transfer backends of a worker: which it offers in Hello, and their halves, from `--kv-transfer-backend`.

    auto    shm where peers are on this host, else grpc
    grpc    grpc alone
    tcp     plain sockets on a port of P's own, falling back to grpc; both sides must ask for it
    shm     shm, falling back to grpc
    jax     JAX's transfer server, falling back to grpc; both sides must ask for it

D's order of preference decides. A backend that cannot start here is not offered, and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import jax

from jdisagg.api.byte_source import GrpcByteSource
from jdisagg.api.channels import Credentials
from jdisagg.handoff.identity import Backend
from jdisagg.serve.engines import Core
from jdisagg.transfer.base import Fetcher, Post, Publisher
from jdisagg.transfer.choice import FetcherSet, PublisherSet
from jdisagg.transfer.cut import Cutter, head_shards
from jdisagg.transfer.drill import TransferDrill
from jdisagg.transfer.grpc_backend import PieceStore
from jdisagg.transfer.host_backend import ByteSource, HostPublisher, host_fetcher
from jdisagg.transfer.jax_backend import JaxPublisher, jax_fetcher, joiner_of, warm_up_fetches
from jdisagg.transfer.jax_server import NUM_ADDRESSES, TransferServers, Unsupported
from jdisagg.transfer.shm_backend import ShmSource, ShmStore, same_host_token
from jdisagg.transfer.target import PieceTarget
from jdisagg.transfer.tcp_source import TcpSource
from jdisagg.transfer.tcp_store import TcpStore

log = logging.getLogger(__name__)

_ORDER = {
    "auto": ("shm", "grpc"),
    "grpc": ("grpc",),
    "tcp": ("tcp", "grpc"),
    "shm": ("shm", "grpc"),
    "jax": ("jax", "grpc"),
}


@dataclass(kw_only=True)
class PrefillBackends:
    """P's halves, and what Hello says of them."""

    offered: list[Backend] = field(default_factory=list)
    publishers: PublisherSet
    store: PieceStore  # what PeerService.Fetch reads
    num_executables: int = 0


@dataclass(kw_only=True)
class DecodeBackends:
    """D's halves, what Hello says of them, and what has to be closed, in order."""

    offered: list[Backend]
    fetcher: FetcherSet
    head_shards: int
    closers: list[Callable[[], None]]
    on_down: Callable[[str], None]  # a peer's connection was given up
    num_executables: int = 0


def prefill_backends(core: Core, host: str, credentials: Credentials, drill: TransferDrill) -> PrefillBackends:
    """Start P's halves; peers reach those that listen at `host`."""
    config, post = core.config.transfer, core.inbox.post
    max_bytes, checksums = config.transfer_buffer_bytes, config.checksums
    store = PieceStore()
    offered: list[Backend] = []
    publishers: list[Publisher] = []
    num_executables = 0
    for name in _ORDER[config.kv_transfer_backend]:
        try:
            backend = _backend(name)
            if name == "grpc":
                publisher: Publisher = HostPublisher(name, store, post, max_bytes=max_bytes, checksums=checksums)
            elif name == "shm":
                publisher = HostPublisher(name, ShmStore(), post, max_bytes=max_bytes, checksums=checksums)
            elif name == "tcp":
                _check_plain(credentials)
                publisher = HostPublisher(
                    name, TcpStore(core.config.server.host, host), post, max_bytes=max_bytes, checksums=checksums
                )
            else:
                servers = TransferServers(jax.local_devices(), host)
                cutter = Cutter(core.runner.device.empty_piece().arrays, checksums=checksums)
                num_executables += cutter.warm_up()
                publisher = JaxPublisher(servers, cutter, post, max_bytes=max_bytes)
        except (Unsupported, OSError) as error:
            _not_offered(name, error)
            continue
        offered.append(backend)
        publishers.append(drill.publisher(publisher))
    return PrefillBackends(offered=offered, publishers=PublisherSet(publishers), store=store, num_executables=num_executables)


def decode_backends(
    core: Core, target: PieceTarget, host: str, credentials: Credentials, drill: TransferDrill
) -> DecodeBackends:
    """Start D's halves for pieces that become like `target`."""
    config, post = core.config.transfer, core.inbox.post
    offered: list[Backend] = []
    fetchers: list[Fetcher] = []
    closers: list[Callable[[], None]] = []
    droppers: list[Callable[[str], None]] = []
    num_executables = 0
    for name in _ORDER[config.kv_transfer_backend]:
        try:
            backend = _backend(name)
            if name == "grpc":
                source = GrpcByteSource(credentials)
                closers.append(source.close)  # a fetch from a dead peer ends with its channel
                droppers.append(source.drop)
                fetcher = drill.fetcher(_carrying(name, drill.byte_source(source), target), post)
            elif name == "shm":
                fetcher = drill.fetcher(_carrying(name, drill.byte_source(ShmSource()), target), post)
            elif name == "tcp":
                _check_plain(credentials)
                sockets = TcpSource()
                closers.append(sockets.close)
                droppers.append(sockets.drop)
                fetcher = drill.fetcher(_carrying(name, drill.byte_source(sockets), target), post)
            else:
                servers = TransferServers(jax.local_devices(), host)
                joiner = joiner_of(target, target.dtype, checksums=config.checksums)
                num_executables += warm_up_fetches(joiner, target)
                fetcher = drill.fetcher(partial(jax_fetcher, servers, joiner, target), post)
        except (Unsupported, OSError) as error:
            _not_offered(name, error)
            continue
        offered.append(backend)
        fetchers.append(fetcher)
    chosen = FetcherSet(fetchers, post)

    def on_down(peer: str) -> None:
        for drop in droppers:
            drop(peer)

    return DecodeBackends(
        offered=offered,
        fetcher=chosen,
        head_shards=head_shards(target.sharding, target.shape),
        closers=[*closers, chosen.close],
        on_down=on_down,
        num_executables=num_executables,
    )


def _carrying(name: str, source: ByteSource, target: PieceTarget) -> Callable[[Post], Fetcher]:
    return partial(host_fetcher, name, source, target)


def _backend(name: str) -> Backend:
    """What Hello says: jax pairs with the same version alone, shm with processes of the same host alone."""
    if name == "jax":
        return Backend(name=name, version=jax.__version__, num_transport_addresses=NUM_ADDRESSES)
    return Backend(name=name, version=same_host_token() if name == "shm" else "")


def _check_plain(credentials: Credentials) -> None:
    if credentials.channel is not None or credentials.server is not None:
        raise Unsupported("it sends KV as it is, and this worker encrypts")


def _not_offered(name: str, error: Exception) -> None:
    log.warning("transfer backend %s is not offered: %s", name, error)
