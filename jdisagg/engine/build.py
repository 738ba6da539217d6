"""From a loaded model and the configuration to a `ModelRunner`: layout, sizes and buckets are chosen here."""

from __future__ import annotations

import logging
from dataclasses import replace

from jax.sharding import Mesh

from jdisagg.core.config import CacheConfig, Config, LocalPrefill, Numerics
from jdisagg.core.errors import ConfigError
from jdisagg.core.requests import Role
from jdisagg.engine.buckets import decode_buckets, prefill_buckets
from jdisagg.engine.device import Device, DeviceShape
from jdisagg.engine.model import DecoderModel
from jdisagg.engine.ops import choose_ops
from jdisagg.engine.runner import ModelRunner, RunnerShape
from jdisagg.kv.layout import KVLayout, choose_layout
from jdisagg.kv.pool import MIN_PAGES, num_pages_for_bytes
from jdisagg.models.load import LoadedModel

log = logging.getLogger(__name__)

CPU_CACHE_BYTES = 2**30
_ACTIVATIONS = 8  # float32 copies of the widest activation and of the logits that a step may hold at once


def make_runner(loaded: LoadedModel, mesh: Mesh, config: Config, role: Role) -> ModelRunner:
    """Allocate pool and state on `mesh` and bind the steps; nothing is compiled yet (see `warm_up`).

    Raises ConfigError naming the flag when sizes contradict each other or do not fit.
    """
    layout = choose_layout(loaded.spec.kv_spec(loaded.kv_dtype), mesh, config.cache.page_size)
    scheduler, wanted_len = config.scheduler, config.model.max_model_len
    longest = wanted_len or loaded.spec.max_model_len
    num_pages = _num_pages(loaded, layout, mesh, config, longest)
    max_model_len = min(longest, (num_pages - 1) * layout.page_size)
    needed = -(-longest // layout.page_size) + 1  # page 0 is never used
    if wanted_len is None and max_model_len < longest:
        log.warning(
            "%d KV pages of %d tokens hold %d of the model's %d: longer requests are refused; --num-pages %d would serve all",
            *(num_pages, layout.page_size, max_model_len, longest, needed),
        )
    if wanted_len is not None and max_model_len < wanted_len:
        raise ConfigError(
            f"--max-model-len: got {wanted_len}, {num_pages} pages of {layout.page_size} tokens hold {max_model_len}; "
            f"lower it to {max_model_len}, or give --num-pages {needed} or --kv-cache-bytes {needed * layout.bytes_per_page}",
            field="max_model_len",
        )
    model = DecoderModel(loaded.spec, choose_ops(layout, mesh), loaded.layer_loop)
    sizes = DeviceShape(
        max_num_seqs=scheduler.max_num_seqs,
        pages_per_seq=-(-max_model_len // layout.page_size),
        vocab_size=loaded.spec.vocab_size,
        chunk_tokens=config.transfer.transfer_chunk_tokens,
    )
    device = Device(model, loaded.params, layout, mesh, sizes, num_pages=num_pages)
    return ModelRunner(device, runner_shape(config, role, max_model_len))


def runner_shape(config: Config, role: Role, max_model_len: int) -> RunnerShape:
    """The executables `role` can need: P never decodes, D prefills only when it may."""
    shape = RunnerShape(
        prefill=prefill_buckets(config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs),
        decode=decode_buckets(config.scheduler.max_num_seqs),
        exact=False,
        max_model_len=max_model_len,
    )
    if config.model.numerics is Numerics.EXACT:
        return replace(shape, prefill=(), decode=(), exact=True)
    if role is Role.PREFILL:
        return replace(shape, decode=())
    if role is Role.DECODE and config.transfer.local_prefill is LocalPrefill.NEVER:
        return replace(shape, prefill=())
    return shape


def _num_pages(loaded: LoadedModel, layout: KVLayout, mesh: Mesh, config: Config, longest: int) -> int:
    """Pages of the pool from whichever of the three sizes was given."""
    cache = config.cache
    if cache.num_pages is not None and cache.kv_cache_bytes is not None:
        raise ConfigError("num_pages and kv_cache_bytes are both given; keep one of them", field="num_pages")
    if cache.num_pages is not None:
        return cache.num_pages
    if cache.kv_cache_bytes is not None:
        return _fitting_pages(layout, cache.kv_cache_bytes, "--kv-cache-bytes", f"got {cache.kv_cache_bytes}")
    useful = 2 * config.scheduler.max_num_seqs * -(-longest // layout.page_size) + 1  # every slot full, as much again cached
    if mesh.devices.flat[0].platform == "cpu":
        return min(useful, _fitting_pages(layout, CPU_CACHE_BYTES, "--kv-cache-bytes", f"default {CPU_CACHE_BYTES}"))
    free = _free_bytes(loaded, mesh, cache, config)
    share = cache.device_memory_utilization
    return _fitting_pages(layout, free, "--device-memory-utilization", f"{share} leaves {free} bytes for KV")


def _fitting_pages(layout: KVLayout, num_bytes: int, flag: str, got: str) -> int:
    """Pages in `num_bytes`, which come from `flag`. Raises ConfigError when it is less than a pool needs."""
    num_pages, needed = num_pages_for_bytes((layout,), num_bytes), MIN_PAGES * layout.bytes_per_page
    if num_pages < MIN_PAGES:
        raise ConfigError(
            f"{flag}: {got}, wanted at least {needed} bytes: {MIN_PAGES} pages of {layout.page_size} "
            f"tokens, {layout.bytes_per_page} bytes each (page 0 is never used); raise it or lower --page-size",
            field=flag.removeprefix("--").replace("-", "_"),
        )
    return num_pages


def _free_bytes(loaded: LoadedModel, mesh: Mesh, cache: CacheConfig, config: Config) -> int:
    """Bytes for KV over the whole mesh, after weights and an upper bound of what state and steps need."""
    free = []
    for device in mesh.devices.flat:
        stats = device.memory_stats() or {}
        limit = int(stats.get("bytes_limit", 0) * cache.device_memory_utilization)
        free.append(limit - int(stats.get("bytes_in_use", 0)))
    spec, scheduler = loaded.spec, config.scheduler
    widest = max(spec.mlp, spec.embed, spec.attention.num_heads * spec.attention.head_dim)
    steps = 4 * _ACTIVATIONS * (scheduler.max_num_batched_tokens * widest + scheduler.max_num_seqs * spec.vocab_size)
    left = (min(free) - steps) * len(free)
    if left <= 0:
        raise ConfigError(
            f"device_memory_utilization: {cache.device_memory_utilization} leaves {left} bytes for KV after the weights and "
            f"{steps} bytes for steps; raise it, lower --max-num-batched-tokens, or use more devices",
            field="device_memory_utilization",
        )
    return left
