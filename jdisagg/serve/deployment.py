"""The engines of one worker process, and what has to be closed with them. `build.py` makes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from jdisagg.api.generation.grammar_gate import GrammarGate
from jdisagg.api.generation.local_engine import ask
from jdisagg.api.kv_events.ring import KVEventRing
from jdisagg.api.peer.client import GrpcPeerClient
from jdisagg.api.peer.piece_server import PieceServer
from jdisagg.core.config import LocalPrefill
from jdisagg.core.fleet import ModelCard
from jdisagg.engine.compiles import CompileCounter
from jdisagg.handoff.directory import PrefillDirectory
from jdisagg.roles.engine_role import EngineRole
from jdisagg.roles.engine_thread import EngineThread
from jdisagg.roles.kv_feed import KVEventFeed
from jdisagg.serve.engine_core import Core
from jdisagg.serve.engines import OnCrash, start_engine


class Deployment:
    """One engine, or two that belong together. `front` takes the clients' requests."""

    def __init__(self, core: Core, loop: asyncio.AbstractEventLoop, on_crash: OnCrash) -> None:
        """`core` is that of the engine added last; an engine's cache events are kept for listeners on `loop`."""
        self.core = core
        self.num_executables = core.num_executables
        self.gate = None if core.grammars is None else GrammarGate(core.grammars.vocabulary, core.metrics)
        self.engines: list[EngineThread] = []
        self.peer_server: PieceServer | None = None
        self.peer_client: GrpcPeerClient | None = None
        self.prefill = PrefillDirectory(core.config.transfer.prefill)
        self.closers: list[Callable[[], None]] = []
        self.kv_rings: dict[str, KVEventRing] = {}  # by role of the engine; empty when events are off
        self._loop = loop
        self._on_crash = on_crash
        self._cores: list[Core] = []  # of the engines, in the same order
        self._compiles = CompileCounter()
        self._counted_compiles = 0

    @property
    def front(self) -> EngineThread:
        """The engine that clients talk to: the last one added."""
        return self.engines[-1]

    @property
    def bits(self) -> str:
        """As in `jdisagg.core.bits`; of two engines that round alike those of both, else of one behind the other's."""
        return "/".join(dict.fromkeys(core.bits for core in self._cores))

    def card(self, name: str) -> ModelCard:
        """What the served model promises."""
        loaded = self.core.loaded
        return ModelCard(
            name=name,
            max_model_len=self.core.runner.max_model_len,
            vocab_size=loaded.spec.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            fingerprint=loaded.fingerprint,
        )

    def compiles_are_over(self) -> None:
        """From here on every compilation counts against `compiles_after_ready_total`."""
        self._counted_compiles = self._compiles.count

    def count_compiles(self) -> None:
        """Bring `compiles_after_ready_total` up to date; called at every scrape."""
        count = self._compiles.count
        self.core.metrics.engine.compiles_after_ready.inc(count - self._counted_compiles)
        self._counted_compiles = count

    def not_ready_reason(self) -> str:
        """Empty when a request would be served now: on D that takes a usable P whose KV comes, or leave to prefill here."""
        return self._no_prefill_reason() if self.core.config.transfer.local_prefill is LocalPrefill.NEVER else ""

    def _no_prefill_reason(self) -> str:
        """Empty where a P can be expected to serve, and where none is asked."""
        return "" if self.peer_client is None else self.prefill.not_ready_reason(self.peer_client.obstacles())

    def cannot_serve(self) -> str:
        """The same for routers, which know themselves of whom they have told us."""
        return self.not_ready_reason() if self._knows_prefill else ""

    def is_alone(self) -> bool:
        """Whether this is a D that reaches none of the P it knows. Routers then ask others first, whatever it may compute."""
        return self._knows_prefill and bool(self._no_prefill_reason())

    @property
    def _knows_prefill(self) -> bool:
        return bool(self.prefill.static or self.prefill.told)

    @property
    def needs_prefill(self) -> bool:
        """Whether this is a D that serves only while a router has a P for it."""
        config = self.core.config.transfer
        return self.peer_client is not None and config.local_prefill is LocalPrefill.NEVER and not config.prefill

    @property
    def cache_tokens(self) -> int:
        """That the prefix cache holds at most: one, where there is none."""
        runner = self.core.runner
        return (runner.num_pages - 1) * runner.page_size if self.core.config.cache.enable_prefix_caching else 1

    def learn_prefill(self, router: str, peers: tuple[str, ...]) -> None:
        """A router told this D which prefill workers there are; others it has spoken to are forgotten. On the loop, at every
        heartbeat."""
        failures = {} if self.peer_client is None else self.peer_client.failures()
        self.prefill.learn(router, peers, failures, monotonic())
        if self.peer_client is not None:
            self.peer_client.offer(frozenset((*self.prefill.static, *self.prefill.told)))

    def add_engine(self, core: Core, role: EngineRole) -> None:
        """Start one engine."""
        feed, cache = None, core.config.cache
        if cache.enable_kv_events:
            ring = KVEventRing(
                pool=core.role.value,
                epoch=core.epoch,
                page_size=core.runner.page_size,
                num_batches=cache.kv_events_buffer,
                loop=self._loop,
            )
            self.kv_rings[ring.pool] = ring
            feed = KVEventFeed(core.scheduler.kv_journal(), ring.post, core.metrics)
        self.engines.append(start_engine(core, role, self._crashed, feed))
        self._cores.append(core)

    def _crashed(self, error: BaseException) -> None:
        """The process is about to end: clients of the other engine get their error, too."""
        for other in self.engines:
            if not other.is_over:
                other.break_down(f"the other engine of this process stopped: {type(error).__name__}")
        self._on_crash(error)

    async def reset_prefix_cache(self) -> int:
        """Every engine forgets its cached prefixes; returns how many pages. Raises Unavailable when one does not turn over."""
        each = zip(self.engines, self._cores, strict=True)
        return sum([await ask(engine, core.scheduler.reset_prefix_cache) for engine, core in each])

    async def aclose(self) -> None:
        """End peer connections, and what checks grammars."""
        if self.gate is not None:
            await self.gate.aclose()
        if self.peer_client is not None:
            await self.peer_client.aclose()

    def stop(self) -> None:
        """Stop engine threads, then transfer threads."""
        for engine in self.engines:
            engine.stop()
        for close in self.closers:
            close()
