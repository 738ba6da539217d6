"""One engine below its role: model, runner, scheduler, and what its threads share."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import Any

import jax

from jdisagg.api.http.version import package_version
from jdisagg.core.config import Config, LocalPrefill
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import ALL_GRAMMARS, GrammarKind, Role
from jdisagg.engine.bits import compute_bits
from jdisagg.engine.build import make_runner
from jdisagg.engine.costs import measure_retraction_cost
from jdisagg.engine.runner import ModelRunner
from jdisagg.engine.warmup import warm_up
from jdisagg.handoff.credit import most_arriving_of
from jdisagg.handoff.identity import Backend, CacheGroup, Identity
from jdisagg.kv.memory import wants_memory
from jdisagg.kv.spec import KVSpec
from jdisagg.models.load import LoadedModel, load_model
from jdisagg.models.sharding import make_mesh
from jdisagg.roles.inbox import Inbox
from jdisagg.roles.streams import Streams
from jdisagg.sched.log import make_scheduler
from jdisagg.sched.scheduler import Scheduler
from jdisagg.serve.cores import usable_cores
from jdisagg.serve.grammars import grammars_of
from jdisagg.text.grammar import Grammars
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.transfer.target import PieceTarget

log = logging.getLogger(__name__)

NO_ROOM = (
    "--transfer-chunk-tokens: no memory is left for a piece of KV beside weights and the pool; lower it, or what KV gets "
    "(--kv-cache-bytes, --num-pages, --device-memory-utilization)"
)


@dataclass(frozen=True, kw_only=True)
class Core:
    """Everything of one engine below its role."""

    config: Config
    role: Role
    loaded: LoadedModel
    runner: ModelRunner
    scheduler: Scheduler
    inbox: Inbox
    streams: Streams
    metrics: Metrics
    worker: str  # "pid 123 @ 127.0.0.1:9000"
    epoch: str
    num_executables: int
    bits: str  # "" = the numerics are not `exact`
    grammars: Grammars | None  # None: requests with a grammar are refused

    @property
    def kv_spec(self) -> KVSpec:
        """KV of one token, unsharded."""
        return self.loaded.spec.kv_spec(self.loaded.kv_dtype)

    @property
    def device(self) -> Any:
        """One of those that compute for it, which are alike."""
        return next(iter(self.runner.device.whole.device_set))

    @property
    def grammar_kinds(self) -> frozenset[GrammarKind]:
        """What it serves, as it tells others."""
        return frozenset() if self.grammars is None else ALL_GRAMMARS

    @cached_property
    def piece_target(self) -> PieceTarget:
        """What arriving pieces must become for this engine's import executable, and the room for them, which all share."""
        sharding, chunk_tokens = self.runner.device.piece_sharding, self.runner.chunk_tokens
        most_tokens = most_arriving_of(self.config.transfer, self.kv_spec.bytes_per_token) * chunk_tokens
        return PieceTarget.of(self.kv_spec, sharding, chunk_tokens, most_tokens=most_tokens)

    def identity(self, backends: Sequence[Backend]) -> Identity:
        """What Hello says of this engine; `backends` in order of preference."""
        return Identity(
            fingerprint=self.loaded.fingerprint,
            fingerprint_parts=self.loaded.fingerprint_parts,
            worker=self.worker,
            epoch=self.epoch,
            groups=(CacheGroup(spec=self.kv_spec, page_size=self.config.cache.page_size),),
            backends=tuple(backends),
            build=package_version(),
            grammars=self.grammar_kinds,
            bits=self.bits,
        )


def build_core(
    config: Config,
    role: Role,
    devices: Sequence[Any],
    *,
    tp: int,
    metrics: Metrics,
    worker: str,
    tokenizer: Tokenizer | None,
) -> Core:
    """Load the model onto the first `tp` of `devices`, make the pool, compile and run every executable. `tokenizer`: what
    grammars are read with; None = there is none."""
    mesh = make_mesh(devices, tp)
    started_s = monotonic()
    loaded = load_model(config.model, mesh, seed=config.server.seed or 0)
    loaded_s = monotonic()
    grammars = grammars_of(tokenizer, loaded.spec.vocab_size, loaded.eos_token_ids)
    runner = make_runner(loaded, mesh, config, role, grammars)
    if (scaling := loaded.spec.rope.scaling) is not None:
        log.info("%s: positions are scaled as config.json has it: %s", role.value, scaling)
    log.info(
        "%s: weights of %s in %.1f s on %d %s (%s); %d KV pages of %d tokens, %d tokens per request at most; compiling",
        *(role.value, config.model.model, loaded_s - started_s, tp, devices[0].device_kind, devices[0].platform),
        *(runner.num_pages - 1, runner.page_size, runner.max_model_len),
    )
    warmed = warm_up(runner, num_cores=_cores_to_compile(devices[0].platform))
    log.info("%s: %d executables compiled and run in %.1f s", role.value, len(warmed), monotonic() - loaded_s)
    host_tokens = config.scheduler.host_kv_bytes // loaded.spec.kv_spec(loaded.kv_dtype).bytes_per_token
    with wants_memory(NO_ROOM):
        bits = _bits(runner, role)
        cost = measure_retraction_cost(runner) if host_tokens else None
    if cost is not None:
        log.info(
            "%s: host memory for KV of %d tokens; per token %.1f us to copy one way, %.1f us to compute again%s",
            *(role.value, host_tokens, cost.copy_s_per_token * 1e6, cost.recompute_s_per_token * 1e6),
            "" if cost.prefers_copy else ", which is quicker: it stays unused",
        )
        if not cost.prefers_copy:
            host_tokens = 0
    scheduler = make_scheduler(
        config.scheduler,
        role=role,
        max_model_len=runner.max_model_len,
        page_size=runner.page_size,
        num_pages=runner.num_pages,
        eos_token_ids=loaded.eos_token_ids,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        local_prefill=config.transfer.local_prefill is not LocalPrefill.NEVER,
        vocab_size=loaded.spec.vocab_size,
        host_tokens=host_tokens,
    )
    return Core(
        config=config,
        role=role,
        loaded=loaded,
        runner=runner,
        scheduler=scheduler,
        inbox=Inbox(),
        streams=Streams(),
        metrics=metrics,
        worker=worker,
        epoch=uuid.uuid4().hex,
        num_executables=len(warmed),
        bits=bits,
        grammars=grammars,
    )


def _cores_to_compile(platform: str) -> int:
    """XLA:CPU keeps all cores busy with one program, and weights and KV lie in the memory that more at a time would take: of 32
    small layers 1.1 GB for one, 1.7 for two, 3.5 for eight; a first start wins no time. Others mostly have one thread."""
    return 1 if platform == "cpu" else usable_cores()


def _bits(runner: ModelRunner, role: Role) -> str:
    if not runner.shape.exact:
        return ""
    bits = compute_bits(runner)
    log.info("%s: exact: computes bits %s (jax %s)", role.value, bits, jax.__version__)
    return bits
