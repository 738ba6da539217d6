"""The worker roles as sets of engines: unified (one), prefill (one), decode (one), colocated (prefill and decode, wired)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from jdisagg.api.byte_source import GrpcByteSource
from jdisagg.api.channels import INSECURE, Credentials
from jdisagg.api.kv_event_ring import KVEventRing
from jdisagg.api.local_engine import ask
from jdisagg.api.peer_client import GrpcPeerClient
from jdisagg.api.peer_server import PeerServer
from jdisagg.api.piece_server import PieceServer
from jdisagg.api.token_engine import ModelCard
from jdisagg.core.config import Config, LocalPrefill
from jdisagg.core.drill import drill_of
from jdisagg.core.errors import ConfigError
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.engine.compiles import CompileCounter
from jdisagg.handoff.directory import PrefillDirectory
from jdisagg.models.load import LoadedModel
from jdisagg.roles.engine_thread import EngineThread
from jdisagg.roles.in_process import InProcessPeers
from jdisagg.roles.kv_borrowing import KVBorrowing
from jdisagg.roles.kv_feed import KVEventFeed
from jdisagg.roles.kv_lending import KVLending
from jdisagg.roles.side import Side
from jdisagg.serve.backends import decode_backends, prefill_backends
from jdisagg.serve.devices import usable_devices
from jdisagg.serve.engines import Core, build_core, decode_side, prefill_side, start_engine, unified_side
from jdisagg.serve.mirror import borrowing, lending, wants_to_borrow
from jdisagg.transfer.choice import PublisherSet
from jdisagg.transfer.device_put import DevicePutPublisher, device_put_fetcher
from jdisagg.transfer.drill import TransferDrill
from jdisagg.transfer.grpc_backend import PieceStore
from jdisagg.transfer.host_backend import host_fetcher, host_publisher
from jdisagg.transfer.target import PieceTarget

log = logging.getLogger(__name__)

OnCrash = Callable[[BaseException], None]


class Deployment:
    """The engines of one process and what has to be closed with them. `front` takes the clients' requests."""

    def __init__(self, core: Core, compiles: CompileCounter) -> None:
        self.loaded: LoadedModel = core.loaded
        self.worker = core.worker
        self.epoch = core.epoch
        self.num_executables = core.num_executables
        self.engines: list[EngineThread] = []
        self.peer_server: PeerServer | PieceServer | None = None
        self.peer_client: GrpcPeerClient | None = None
        self.prefill = PrefillDirectory(core.config.transfer.prefill)
        self.closers: list[Callable[[], None]] = []
        self.kv_rings: dict[str, KVEventRing] = {}  # by role of the engine; empty when events are off
        self._resets: list[Callable[[], int]] = []  # of the engines' prefix caches, in the same order
        self._core = core
        self._compiles = compiles
        self._counted_compiles = 0

    @property
    def front(self) -> EngineThread:
        """The engine that clients talk to: the last one built."""
        return self.engines[-1]

    def card(self, name: str) -> ModelCard:
        """What the served model promises."""
        return ModelCard(
            name=name,
            max_model_len=self._core.runner.max_model_len,
            vocab_size=self.loaded.spec.vocab_size,
            eos_token_ids=self.loaded.eos_token_ids,
            fingerprint=self.loaded.fingerprint,
        )

    def compiles_are_over(self) -> None:
        """From here on every compilation counts against `compiles_after_ready_total`."""
        self._counted_compiles = self._compiles.count

    def count_compiles(self) -> None:
        """Bring `compiles_after_ready_total` up to date; called at every scrape."""
        count = self._compiles.count
        self._core.metrics.engine.compiles_after_ready.inc(count - self._counted_compiles)
        self._counted_compiles = count

    def not_ready_reason(self) -> str:
        """Empty when a request would be served now: on D that takes a usable P, or leave to prefill here."""
        if self.peer_client is None or self._core.config.transfer.local_prefill is not LocalPrefill.NEVER:
            return ""
        return self.prefill.not_ready_reason(self.peer_client.failures())

    @property
    def needs_prefill(self) -> bool:
        """Whether this is a D that serves only while a router has a P for it."""
        config = self._core.config.transfer
        return self.peer_client is not None and config.local_prefill is LocalPrefill.NEVER and not config.prefill

    def learn_prefill(self, router: str, peers: tuple[str, ...]) -> None:
        """A router told this D which prefill workers there are; others it has spoken to are forgotten. On the loop."""
        self.prefill.learn(router, peers)
        if self.peer_client is not None:
            self.peer_client.keep_only({*self.prefill.static, *self.prefill.told})

    def add_engine(self, core: Core, side: Side, on_crash: OnCrash, loop: asyncio.AbstractEventLoop) -> None:
        """Start one engine; its cache events, if they are on, are kept for listeners on `loop`."""
        feed, cache = None, core.config.cache
        if cache.enable_kv_events:
            ring = KVEventRing(
                pool=core.role.value,
                epoch=core.epoch,
                page_size=core.runner.page_size,
                num_batches=cache.kv_events_buffer,
                loop=loop,
            )
            self.kv_rings[ring.pool] = ring
            feed = KVEventFeed(core.scheduler.kv_journal(), ring.post, core.metrics)
        self.engines.append(start_engine(core, side, on_crash, feed))
        self._resets.append(core.scheduler.reset_prefix_cache)

    async def reset_prefix_cache(self) -> int:
        """Every engine forgets its cached prefixes; returns the pages freed. Raises Unavailable when one does not turn over."""
        freed = [await ask(thread, reset) for thread, reset in zip(self.engines, self._resets, strict=True)]
        return sum(freed)

    async def aclose(self) -> None:
        """End peer connections."""
        if self.peer_client is not None:
            await self.peer_client.aclose()

    def stop(self) -> None:
        """Stop engine threads, then transfer threads."""
        for engine in self.engines:
            engine.stop()
        for close in self.closers:
            close()


def build_deployment(
    config: Config,
    metrics: Metrics,
    worker: str,
    loop: asyncio.AbstractEventLoop,
    on_crash: OnCrash,
    *,
    credentials: Credentials = INSECURE,
    address: str = "",
) -> Deployment:
    """Build the role's engines, running; peers are reached with `credentials`, and they reach this process's gRPC server at
    `address` ("" = not at all). Raises ConfigError."""
    host = address.rpartition(":")[0] or "127.0.0.1"
    compiles = CompileCounter()
    if config.role == "colocated":
        return _colocated(config, metrics, worker, compiles, loop=loop, on_crash=on_crash)
    role = Role(config.role)
    tp = config.model.tensor_parallel_size
    core = build_core(config, role, usable_devices(config), tp=tp, metrics=metrics, worker=worker)
    deployment = Deployment(core, compiles)
    drill = TransferDrill(drill_of())
    if role is Role.PREFILL:
        backends = prefill_backends(core, host, credentials, drill)
        side = prefill_side(core, backends.publishers, _grpc_borrowing(core, deployment, credentials))
        deployment.num_executables += backends.num_executables
        deployment.peer_server = PeerServer(
            core.identity(backends.offered), post=core.inbox.post, pieces=backends.store, config=config.transfer
        )
        deployment.closers.append(backends.publishers.close)
    elif role is Role.DECODE:
        moving = decode_backends(core, _target(core), host, credentials, drill)
        deployment.num_executables += moving.num_executables
        peers = GrpcPeerClient(
            core.identity(moving.offered),
            loop=loop,
            post=drill.messages(core.inbox.post),
            config=config.transfer,
            credentials=credentials,
            on_down=moving.on_down,
        )
        peers.watch(config.transfer.prefill)
        side = decode_side(
            core,
            peers=peers,
            fetcher=moving.fetcher,
            backend=moving.offered[0].name,
            known_peers=lambda: deployment.prefill.candidates,
            head_shards=moving.head_shards,
            lending=_grpc_lending(core, deployment, address) if address else None,
        )
        deployment.peer_client = peers
        deployment.closers += moving.closers
    else:
        side = unified_side(core)
    deployment.add_engine(core, side, on_crash, loop)
    return deployment


def _grpc_borrowing(core: Core, deployment: Deployment, credentials: Credentials) -> KVBorrowing | None:
    """P fetches from the gRPC servers of decode workers."""
    if not wants_to_borrow(core):
        return None
    source = GrpcByteSource(credentials, stall_s=core.config.transfer.dead_after_s)
    fetcher = host_fetcher("grpc", source, _target(core), core.inbox.post, on_end=source.drop)
    deployment.closers += [source.close, fetcher.close]
    return borrowing(core, fetcher)


def _grpc_lending(core: Core, deployment: Deployment, address: str) -> KVLending:
    """D's gRPC server offers what is lent."""
    pieces, config = PieceStore(), core.config.transfer
    max_bytes = config.transfer_buffer_bytes
    publisher = host_publisher("grpc", pieces, core.inbox.post, max_bytes=max_bytes, checksums=config.checksums)
    deployment.peer_server = PieceServer(pieces)
    deployment.closers.append(publisher.close)
    return lending(core, publisher, address)


def _colocated(
    config: Config,
    metrics: Metrics,
    worker: str,
    compiles: CompileCounter,
    *,
    loop: asyncio.AbstractEventLoop,
    on_crash: OnCrash,
) -> Deployment:
    devices = usable_devices(config)
    tp_p, tp_d = config.prefill_tp, config.decode_tp
    if len(devices) == tp_p == tp_d == 1:
        log.info("both engines on one device, %s: give each pool a size with --kv-cache-bytes or --num-pages", devices[0])
        devices = [*devices, *devices]
    if len(devices) < tp_p + tp_d:
        raise ConfigError(
            f"--role colocated: got {len(devices)} devices, wanted {tp_p} for prefill and {tp_d} for decode; "
            "give more with --devices or lower --prefill-tp and --decode-tp",
            field="devices",
        )
    prefill = build_core(_logging_to(config, "prefill"), Role.PREFILL, devices[:tp_p], tp=tp_p, metrics=metrics, worker=worker)
    decode = build_core(_logging_to(config, "decode"), Role.DECODE, devices[tp_p:], tp=tp_d, metrics=metrics, worker=worker)
    publisher = DevicePutPublisher(prefill.inbox.post)
    fetcher = device_put_fetcher(publisher, _target(decode), decode.inbox.post, prefill.runner.device.empty_piece())
    peers = InProcessPeers(prefill.inbox, decode.inbox)
    static = (InProcessPeers.ADDRESS,)
    deployment = Deployment(decode, compiles)
    deployment.num_executables += prefill.num_executables
    borrower, lender = None, None
    if wants_to_borrow(prefill):
        lent = DevicePutPublisher(decode.inbox.post)
        borrowed = device_put_fetcher(lent, _target(prefill), prefill.inbox.post, decode.runner.device.empty_piece())
        borrower, lender = borrowing(prefill, borrowed), lending(decode, lent, InProcessPeers.ADDRESS)
        deployment.closers += [lent.close, borrowed.close]
    deployment.add_engine(prefill, prefill_side(prefill, PublisherSet([publisher]), borrower), on_crash, loop)
    side = decode_side(decode, peers=peers, fetcher=fetcher, backend="device_put", known_peers=lambda: static, lending=lender)
    deployment.add_engine(decode, side, on_crash, loop)
    deployment.closers += [publisher.close, fetcher.close]
    return deployment


def _logging_to(config: Config, suffix: str) -> Config:
    """Two schedulers in one process write two schedule logs."""
    path = config.scheduler.schedule_log
    if path is None:
        return config
    return replace(config, scheduler=replace(config.scheduler, schedule_log=f"{path}.{suffix}"))


def _target(core: Core) -> PieceTarget:
    """What arriving pieces must become for this engine's import executable."""
    return PieceTarget.of(core.kv_spec, core.runner.device.piece_sharding, core.runner.chunk_tokens)
