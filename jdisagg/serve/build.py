"""The worker roles as sets of engines: unified (one), prefill (one), decode (one), colocated (prefill and decode, wired)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jdisagg.api.channels import INSECURE, Credentials
from jdisagg.api.peer.byte_source import GrpcByteSource
from jdisagg.api.peer.client import GrpcPeerClient
from jdisagg.api.peer.piece_server import PieceServer
from jdisagg.api.peer.server import PeerServer
from jdisagg.core.config import Config
from jdisagg.core.drill import drill_of
from jdisagg.core.errors import ConfigError
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.engine.sizing import check_shared_device
from jdisagg.kv.layout import choose_layout
from jdisagg.kv.memory import wants_memory
from jdisagg.models.form import choose_dtypes
from jdisagg.models.resolve import read_config, resolve_model
from jdisagg.models.sharding import make_mesh
from jdisagg.models.spec import ModelSpec
from jdisagg.roles.in_process import InProcessPeers
from jdisagg.roles.unified import UnifiedRole
from jdisagg.serve.backends import DecodeBackends, PrefillBackends
from jdisagg.serve.deployment import Deployment
from jdisagg.serve.devices import usable_devices
from jdisagg.serve.engine_core import NO_ROOM, Core, build_core
from jdisagg.serve.engines import OnCrash, decode_role, prefill_role
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.transfer.base import Fetcher, Publisher
from jdisagg.transfer.choice import PublisherSet
from jdisagg.transfer.device_put import DevicePutPublisher, device_put_fetcher
from jdisagg.transfer.drill import TransferDrill
from jdisagg.transfer.grpc_backend import PieceStore
from jdisagg.transfer.host_backend import host_fetcher, host_publisher

log = logging.getLogger(__name__)


def build_deployment(
    config: Config,
    metrics: Metrics,
    worker: str,
    loop: asyncio.AbstractEventLoop,
    on_crash: OnCrash,
    *,
    credentials: Credentials = INSECURE,
    address: str = "",
    tokenizer: Tokenizer | None = None,
) -> Deployment:
    """Build the role's engines, running; peers are reached with `credentials`, and they reach this process's gRPC server at
    `address` ("" = there are none: unified, colocated). `tokenizer`: see `build_core`. Raises ConfigError."""
    devices = usable_devices(config)
    core_of = partial(build_core, metrics=metrics, worker=worker, tokenizer=tokenizer)
    if config.role == "colocated":
        return _colocated(config, devices, core_of, loop=loop, on_crash=on_crash)
    role = Role(config.role)
    core = core_of(config, role, devices, tp=config.model.tensor_parallel_size)
    deployment = Deployment(core, loop, on_crash)
    drill = TransferDrill(drill_of())
    if role is Role.PREFILL:
        _add_prefill(deployment, address, credentials, drill)
    elif role is Role.DECODE:
        _add_decode(deployment, address, credentials, drill, loop)
    else:
        deployment.add_engine(core, UnifiedRole(core.scheduler))
    return deployment


def _add_prefill(deployment: Deployment, address: str, credentials: Credentials, drill: TransferDrill) -> None:
    core = deployment.core
    backends = PrefillBackends(core, _host(address), drill)
    deployment.num_executables += backends.num_executables
    deployment.peer_server = PeerServer(
        core.identity(backends.offered),
        post=core.inbox.post,
        pieces=backends.store,
        config=core.config.transfer,
        grammars=core.grammars,
        is_over=lambda: any(engine.is_over for engine in deployment.engines),
        speed=lambda: deployment.front.loop.load.speed if deployment.engines else None,
    )
    role = prefill_role(core, backends.publishers, _borrowed(deployment, credentials))
    deployment.closers.append(backends.publishers.close)
    deployment.add_engine(core, role)


def _add_decode(
    deployment: Deployment, address: str, credentials: Credentials, drill: TransferDrill, loop: asyncio.AbstractEventLoop
) -> None:
    core, config = deployment.core, deployment.core.config.transfer
    backends = DecodeBackends(core, core.piece_target, _host(address), credentials, drill)
    deployment.num_executables += backends.num_executables
    peers = GrpcPeerClient(
        core.identity(backends.offered),
        loop=loop,
        post=drill.messages(core.inbox.post),
        config=config,
        credentials=credentials,
    )
    peers.watch(config.prefill)
    role = decode_role(
        core,
        peers=peers,
        fetcher=backends.fetcher,
        backend=backends.offered[0].name,
        known_peers=deployment.prefill.candidates,
        head_shards=backends.head_shards,
        lent=_lent(deployment),
        address=address,
    )
    deployment.peer_client = peers
    deployment.closers += backends.closers
    deployment.add_engine(core, role)


def _borrowed(deployment: Deployment, credentials: Credentials) -> Fetcher:
    """P fetches from the gRPC servers of decode workers."""
    core = deployment.core
    source = GrpcByteSource(credentials, stall_s=core.config.transfer.dead_after_s)
    fetcher = host_fetcher("grpc", source, core.piece_target, core.inbox.post, on_end=source.drop)
    deployment.closers += [source.close, fetcher.close]
    return fetcher


def _lent(deployment: Deployment) -> Publisher:
    """D's gRPC server offers what is lent."""
    core, pieces = deployment.core, PieceStore()
    publisher = host_publisher("grpc", pieces, core.inbox.post, checksums=core.config.transfer.checksums)
    deployment.peer_server = PieceServer(pieces)
    deployment.closers.append(publisher.close)
    return publisher


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _colocated(
    config: Config,
    devices: Sequence[Any],
    core_of: Callable[..., Core],
    *,
    loop: asyncio.AbstractEventLoop,
    on_crash: OnCrash,
) -> Deployment:
    tp_p, tp_d = config.prefill_tp, config.decode_tp
    if len(devices) == tp_p == tp_d == 1:
        _check_shared(config, devices[0])
        log.info("both engines on one device, %s", devices[0])
        devices = [*devices, *devices]
    if len(devices) < tp_p + tp_d:
        raise ConfigError(
            f"--role colocated: got {len(devices)} devices, wanted {tp_p} for prefill and {tp_d} for decode; "
            "give more with --devices or lower --prefill-tp and --decode-tp"
        )
    no_copies = replace(config, scheduler=replace(config.scheduler, host_kv_bytes=0))  # P computes KV once and hands it over
    prefill = core_of(_logging_to(no_copies, "prefill"), Role.PREFILL, devices[:tp_p], tp=tp_p)
    decode = core_of(_logging_to(config, "decode"), Role.DECODE, devices[tp_p:], tp=tp_d)
    deployment = Deployment(decode, loop, on_crash)
    deployment.num_executables += prefill.num_executables
    computed, lent = DevicePutPublisher(prefill.inbox.post), DevicePutPublisher(decode.inbox.post)
    fetcher, borrowed = _exchange(computed, prefill, decode), _exchange(lent, decode, prefill)
    deployment.closers += [lent.close, borrowed.close, computed.close, fetcher.close]
    nowhere = Metrics()  # D observes the whole lives of the same requests
    deployment.add_engine(prefill, prefill_role(prefill, PublisherSet([computed]), borrowed, lives=nowhere))
    role = decode_role(
        decode,
        peers=InProcessPeers(prefill.inbox, decode.inbox),
        fetcher=fetcher,
        backend=computed.name,
        known_peers=lambda is_shunned: (InProcessPeers.ADDRESS,),
        lent=lent,
        address=InProcessPeers.ADDRESS,
    )
    deployment.add_engine(decode, role)
    return deployment


def _check_shared(config: Config, device: Any) -> None:
    """Before weights are loaded, which takes minutes."""
    if device.platform == "cpu":
        return
    spec = ModelSpec.from_config(read_config(resolve_model(config.model.model, weights=False)))
    _, kv_dtype = choose_dtypes(config.model, device.platform)
    check_shared_device(choose_layout(spec.kv_spec(kv_dtype), make_mesh([device], 1), config.cache.page_size), config.cache)


def _exchange(publisher: DevicePutPublisher, source: Core, target: Core) -> Fetcher:
    """What brings pieces of `source`'s engine to that of `target`, in this process."""
    with wants_memory(NO_ROOM):
        example = source.runner.device.empty_piece()
        return device_put_fetcher(publisher, target.piece_target, target.inbox.post, example)


def _logging_to(config: Config, suffix: str) -> Config:
    """Two schedulers in one process write two schedule logs."""
    path = config.scheduler.schedule_log
    if path is None:
        return config
    return replace(config, scheduler=replace(config.scheduler, schedule_log=f"{path}.{suffix}"))
