"""An engine above its core: its role, and its thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.engine.nan_search import NanSearch
from jdisagg.handoff.borrower import Borrower
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.lender import Lender
from jdisagg.handoff.messages import Lending
from jdisagg.handoff.prefill_side import PrefillSide
from jdisagg.roles.decode import DecodeRole
from jdisagg.roles.engine_loop import EngineLoop
from jdisagg.roles.engine_role import EngineRole
from jdisagg.roles.engine_thread import EngineThread
from jdisagg.roles.kv_borrowing import KVBorrowing
from jdisagg.roles.kv_feed import KVEventFeed
from jdisagg.roles.kv_lending import KVLending
from jdisagg.roles.observer import TickObserver
from jdisagg.roles.peer_choice import KnownPeers
from jdisagg.roles.pipeline import StepPipeline
from jdisagg.roles.ports import PeerClient
from jdisagg.roles.prefill import PrefillRole
from jdisagg.roles.speed_seen import SpeedSeen
from jdisagg.serve.engine_core import Core
from jdisagg.transfer.base import Fetcher, Publisher
from jdisagg.transfer.choice import PublisherSet

EXIT_ENGINE_CRASHED = 71
LAST_WORDS_S = 0.3
OnCrash = Callable[[BaseException], None]


def start_engine(core: Core, role: EngineRole, on_crash: OnCrash, kv_feed: KVEventFeed | None) -> EngineThread:
    """The engine's thread, running. `kv_feed`: told of cache changes after every tick."""
    speed = SpeedSeen(core.config.scheduler.max_num_batched_tokens) if core.role is Role.PREFILL else None
    loop = EngineLoop(
        scheduler=core.scheduler,
        pipeline=StepPipeline(core.scheduler, core.runner, NanSearch(core.runner.export_tokens, core.runner.chunk_tokens)),
        role=role,
        inbox=core.inbox,
        streams=core.streams,
        metrics=core.metrics,
        observer=TickObserver(core.scheduler, core.metrics, core.role, kv_feed, speed),
        worker=core.worker,
        slow_request_s=core.config.server.slow_request_s,
    )
    thread = EngineThread(loop, name=f"engine-{core.role.value}", on_crash=on_crash)
    thread.start()
    return thread


def prefill_role(core: Core, publishers: PublisherSet, borrowed: Fetcher, *, lives: Metrics | None = None) -> EngineRole:
    """Prompts for decode workers. `borrowed` brings KV of theirs, if it is wanted: what it brought is found again in the
    prefix cache. `lives`: see PrefillRole."""
    config, spec = core.config.transfer, core.kv_spec
    borrowing = KVBorrowing(
        Borrower(config, bytes_per_token=spec.bytes_per_token),
        min_tokens=config.want_min_tokens if core.config.cache.enable_prefix_caching else 0,
        page_size=core.runner.page_size,
        dtype=spec.dtype,
        scheduler=core.scheduler,
        runner=core.runner,
        fetcher=borrowed,
        metrics=core.metrics,
    )
    return PrefillRole(
        scheduler=core.scheduler,
        handoffs=PrefillSide(config, bytes_per_token=spec.bytes_per_token),
        runner=core.runner,
        publishers=publishers,
        metrics=core.metrics,
        worker=core.worker,
        borrowing=borrowing,
        slow_request_s=core.config.server.slow_request_s,
        lives=lives,
    )


def decode_role(
    core: Core,
    *,
    peers: PeerClient,
    fetcher: Fetcher,
    backend: str,
    known_peers: KnownPeers,
    head_shards: int = 1,
    lent: Publisher,
    address: str,
) -> EngineRole:
    """Tokens from KV that P computed. P fetches what `lent` publishes from `address`."""
    config, spec = core.config.transfer, core.kv_spec
    handoffs = DecodeSide(
        config,
        chunk_bytes_per_token=spec.most_bytes_per_token,
        backend=backend,
        head_shards=head_shards,
        vocab_size=core.loaded.spec.vocab_size,
        eos_token_ids=core.loaded.eos_token_ids,
    )
    lending = KVLending(
        Lender(config, bytes_per_token=spec.bytes_per_token),
        Lending(address=address, backend=lent.name, dtype=spec.dtype),
        scheduler=core.scheduler,
        runner=core.runner,
        publisher=lent,
        metrics=core.metrics,
    )
    return DecodeRole(
        config=config,
        scheduler=core.scheduler,
        handoffs=handoffs,
        runner=core.runner,
        peers=peers,
        fetcher=fetcher,
        streams=core.streams,
        metrics=core.metrics,
        known_peers=known_peers,
        page_size=core.runner.page_size,
        lending=lending,
    )


def exit_on_crash(error: BaseException) -> None:
    """A server whose engine is over ends, so that its supervisor starts a fresh one; clients get their error first."""
    del error
    time.sleep(LAST_WORDS_S)
    os._exit(EXIT_ENGINE_CRASHED)
