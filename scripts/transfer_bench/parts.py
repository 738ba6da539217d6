"""What both processes of the benchmark build: pieces, identities, a backend's halves."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from jdisagg.api.peer.byte_source import GrpcByteSource
from jdisagg.core.config import TransferConfig
from jdisagg.handoff.credit import WINDOW_PIECES
from jdisagg.handoff.identity import Backend, CacheGroup, Identity
from jdisagg.kv.spec import KVSpec
from jdisagg.transfer.base import Fetcher, Post, Publisher
from jdisagg.transfer.cut import Cutter
from jdisagg.transfer.grpc_backend import PieceStore
from jdisagg.transfer.host_backend import host_fetcher, host_publisher
from jdisagg.transfer.jax_backend import jax_fetcher, jax_publisher, joiner_of, warm_up_fetches
from jdisagg.transfer.jax_server import TransferServers
from jdisagg.transfer.shm_backend import ShmSource, ShmStore
from jdisagg.transfer.target import PieceTarget
from jdisagg.transfer.tcp_source import TcpSource
from jdisagg.transfer.tcp_store import TcpStore

HOST = "127.0.0.1"
SPEC = KVSpec(num_layers=8, num_kv_heads=8, features=256, dtype="float32")
TOKEN_BYTES = SPEC.bytes_per_token  # 64 KiB
BUFFER_BYTES = 2**29  # of P: a window of large pieces, and those before it whose acknowledgements are on their way
PATIENT = TransferConfig(dead_after_s=60.0)  # a process that stands still for a moment is not dead


@dataclass(frozen=True, kw_only=True)
class Form:
    """One measurement: pieces of `tokens` tokens over `backend`."""

    backend: str
    tokens: int
    checksums: bool
    window: int = WINDOW_PIECES  # pieces published and not acknowledged

    @property
    def piece_bytes(self) -> int:
        """Of one piece."""
        return self.tokens * TOKEN_BYTES


def identity(who: str, backend: str) -> Identity:
    """Enough to pair."""
    group = CacheGroup(spec=SPEC, page_size=16)
    return Identity(
        fingerprint="bench", worker=who, epoch=f"{who}-{backend}", groups=(group,), backends=(Backend(name=backend),)
    )


def device_piece(tokens: int) -> jax.Array:
    """Random bits on the first device."""
    shape = (SPEC.num_layers, tokens, SPEC.num_kv_heads, SPEC.features)
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    return jax.block_until_ready(jax.device_put(values, jax.devices()[0]))


def make_publisher(form: Form, post: Post) -> tuple[Publisher, PieceStore]:
    """P's half, and what PeerService.Fetch reads."""
    store = PieceStore()
    if form.backend != "jax":
        kept = {"grpc": lambda: store, "shm": ShmStore, "tcp": lambda: TcpStore(HOST)}[form.backend]()
        return host_publisher(form.backend, kept, post, checksums=form.checksums), store
    cutter = Cutter([device_piece(form.tokens)], checksums=form.checksums)
    cutter.warm_up()
    return jax_publisher(TransferServers(jax.devices(), HOST), cutter, post), store


def make_fetcher(form: Form, post: Post) -> Fetcher:
    """D's half."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = PieceTarget.of(SPEC, sharding, form.tokens)
    if form.backend != "jax":
        source = {"grpc": GrpcByteSource, "shm": ShmSource, "tcp": TcpSource}[form.backend]()
        return host_fetcher(form.backend, source, target, post)
    joiner = joiner_of(target, target.dtype)
    warm_up_fetches(joiner, target)
    return jax_fetcher(TransferServers(jax.devices(), HOST), joiner, target, post)
