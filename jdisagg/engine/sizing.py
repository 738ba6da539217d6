"""How large a worker's pool is and which executables it has: arithmetic on spec, layout and configuration.

No device is touched: what a device holds comes in as `DeviceMemory`, so the same rule sizes a worker that starts and answers
for a machine that nobody has rented yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from jdisagg.core.config import LEAST_MODEL_LEN, CacheConfig, Config, LocalPrefill, Numerics
from jdisagg.core.errors import ConfigError
from jdisagg.core.requests import Role
from jdisagg.engine.buckets import MAX_SAMPLING_ROWS, SCORE_ROWS, decode_buckets, prefill_buckets
from jdisagg.engine.device import DeviceShape
from jdisagg.engine.host_copies import MOST_BYTES
from jdisagg.engine.page_sizes import check_page_size
from jdisagg.engine.runner import RunnerShape
from jdisagg.handoff.credit import most_arriving_of, most_pieces_of
from jdisagg.kv.layout import KVLayout
from jdisagg.kv.pool import MIN_PAGES, num_pages_for_bytes
from jdisagg.models.spec import ModelSpec
from jdisagg.sched.intake import check_config

SMALL_CACHE_BYTES = 2**30  # on CPU, and where every step copies the cache
_ACTIVATIONS = 8  # float32 copies of the widest activation that a step may hold at once
_STATE = 3  # float32 [slots, vocabulary]: two in the decode state, and what a step without sampling adds
_SAMPLED, _SAMPLED_ON_GPU = 10, 5  # float32 [rows, vocabulary] that sampling holds beside those: TPU up to 9.5, an H200 4.8
_SCORES = 4  # of the logits of prompts, which are scored apart (XLA:GPU needs three)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """One device as its runtime counts, once it holds the weights."""

    limit_bytes: int  # that the runtime may use; 0 where it does not say
    in_use_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSizes:
    """All that is compiled in or allocated besides weights."""

    num_pages: int  # the null page included
    device: DeviceShape
    runner: RunnerShape


def size_engine(
    spec: ModelSpec, layout: KVLayout, config: Config, role: Role, memory: Callable[[], Sequence[DeviceMemory] | None]
) -> EngineSizes:
    """The sizes of one engine. `memory` tells of the devices of its mesh, None on CPU; it is asked only where a share of it
    is wanted. Raises ConfigError naming the flag when sizes contradict each other or do not fit.
    """
    scheduler, wanted_len = config.scheduler, config.model.max_model_len
    longest = _longest(spec, config)
    kept = steps_bytes(spec, layout, config, role) + moving_bytes(layout, config, role)
    num_pages = _num_pages(layout, config, longest, kept, memory)
    max_model_len = min(longest, (num_pages - 1) * layout.page_size)
    needed = pages_for(longest, layout.page_size)
    if wanted_len is not None and max_model_len < wanted_len:
        raise ConfigError(
            f"--max-model-len: got {wanted_len}, {num_pages} pages of {layout.page_size} tokens hold {max_model_len}; "
            f"lower it to {max_model_len}, or give --num-pages {needed} or --kv-cache-bytes {needed * layout.bytes_per_page}"
        )
    if max_model_len < LEAST_MODEL_LEN <= longest:
        least = pages_for(LEAST_MODEL_LEN, layout.page_size)
        raise ConfigError(
            f"--num-pages: {num_pages} pages of {layout.page_size} tokens hold {max_model_len}, wanted at least "
            f"{LEAST_MODEL_LEN}; give --num-pages {least} or --kv-cache-bytes {least * layout.bytes_per_page}"
        )
    runner = runner_shape(config, role, max_model_len, layout)
    device = DeviceShape(
        max_num_seqs=scheduler.max_num_seqs,
        pages_per_seq=-(-max_model_len // layout.page_size),
        vocab_size=spec.vocab_size,
        chunk_tokens=config.transfer.transfer_chunk_tokens,
        prefill_tokens=max((bucket.num_tokens for bucket in runner.prefill), default=0),
    )
    return EngineSizes(num_pages=num_pages, device=device, runner=runner)


def check_sizes(sizes: EngineSizes, spec: ModelSpec, layout: KVLayout, mesh: Mesh, *, config: Config, role: Role) -> None:
    """Raise ConfigError for sizes that kernels cannot serve, or with which the scheduler could never plan a step."""
    check_page_size(
        *(layout, mesh),
        num_heads=spec.attention.num_heads,
        pages_per_seq=sizes.device.pages_per_seq,
        numerics=config.model.numerics,
    )
    check_config(config.scheduler, role=role, max_model_len=sizes.runner.max_model_len)


def _longest(spec: ModelSpec, config: Config) -> int:
    """The context that is wanted. A step reads all of a sequence's KV, so what one may read bounds it, too."""
    wanted, reads = config.model.max_model_len, config.scheduler.max_num_kv_read_tokens
    longest = wanted or spec.max_model_len
    if not LEAST_MODEL_LEN <= reads < longest:  # 0 is no bound; fewer than that the scheduler refuses
        return longest
    if wanted is not None:
        raise ConfigError(
            f"--max-model-len: got {wanted}, and a step reads {reads} tokens of KV at most; lower it to {reads}, or give "
            f"--max-num-kv-read-tokens {wanted} or more"
        )
    return reads


def runner_shape(config: Config, role: Role, max_model_len: int, layout: KVLayout) -> RunnerShape:
    """The executables `role` can need: P never decodes, D prefills only when it may."""
    shape = RunnerShape(
        prefill=prefill_buckets(config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs),
        decode=decode_buckets(config.scheduler.max_num_seqs, least=_least_rows(layout)),
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


def _least_rows(layout: KVLayout) -> int:
    """Of a decode step. XLA:CPU takes four times as long for one 16-bit row as for two; XLA:GPU a third longer for one row,
    which it multiplies as a vector, than for four (Llama 3 8B on an H200)."""
    if layout.heads_major:
        return 2 if layout.as_bits else 1
    return 4


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages of a pool that holds one sequence of `num_tokens`, the null page included."""
    return -(-num_tokens // page_size) + 1


def steps_bytes(spec: ModelSpec, layout: KVLayout, config: Config, role: Role) -> int:
    """Upper bound of what decode state and steps need on one device beside weights and pool."""
    scheduler = config.scheduler
    widest = max(spec.mlp, spec.embed, spec.attention.num_heads * spec.attention.head_dim)
    activations = _ACTIVATIONS * scheduler.max_num_batched_tokens * widest
    samples_all = role is not Role.PREFILL and config.model.numerics is not Numerics.EXACT
    rows = scheduler.max_num_seqs if samples_all else min(scheduler.max_num_seqs, MAX_SAMPLING_ROWS)
    sampled = _SAMPLED if layout.heads_major else _SAMPLED_ON_GPU
    logits = (_STATE * scheduler.max_num_seqs + sampled * rows) * spec.vocab_size  # whole on every shard
    return 4 * max(activations + logits, _SCORES * SCORE_ROWS * spec.vocab_size)


def moving_bytes(layout: KVLayout, config: Config, role: Role) -> int:
    """What KV on its way takes on one device beside the pool: pieces that are published or lent, pieces that come or wait for
    the engine, and copies to host memory and back."""
    transfer, per_token = config.transfer, layout.spec.bytes_per_token
    piece_bytes, num_pieces = transfer.transfer_chunk_tokens * per_token, 0
    if role is not Role.UNIFIED:
        num_pieces = most_pieces_of(transfer, per_token) + most_arriving_of(transfer, per_token)
    copies_bytes = 2 * max(MOST_BYTES, piece_bytes) if config.scheduler.host_kv_bytes else 0
    return (num_pieces * piece_bytes + copies_bytes) // layout.piece_shards


def takes_share(layout: KVLayout, cache: CacheConfig) -> bool:
    """True where a pool is what `--device-memory-utilization` leaves of a device; never on CPU, which nobody asks here."""
    return cache.num_pages is None and cache.kv_cache_bytes is None and not layout.is_turned


def check_shared_device(layout: KVLayout, cache: CacheConfig) -> None:
    """Raise ConfigError for two engines of one process on one device whose pools would be shares of it: what the first has
    taken counts as in use for the second, and with the weights of both that is always more than the share."""
    if takes_share(layout, cache):
        raise ConfigError(
            f"--device-memory-utilization: {cache.device_memory_utilization} of a device that both engines are on: the first "
            "one's pool leaves nothing for the second's; give each a size with --kv-cache-bytes or --num-pages, or give more "
            "devices with --devices"
        )


def _num_pages(
    layout: KVLayout, config: Config, longest: int, kept: int, memory: Callable[[], Sequence[DeviceMemory] | None]
) -> int:
    """Pages of the pool from whichever of the three sizes was given; settings let pass one at the most. A share leaves `kept`
    bytes of every device."""
    cache = config.cache
    if cache.num_pages is not None:
        return cache.num_pages
    if cache.kv_cache_bytes is not None:
        return _fitting_pages(layout, cache.kv_cache_bytes, "--kv-cache-bytes", f"got {cache.kv_cache_bytes}")
    devices = None if layout.is_turned else memory()
    if devices is None:
        # every slot full, as much again cached
        useful = 2 * config.scheduler.max_num_seqs * (pages_for(longest, layout.page_size) - 1) + 1
        return min(useful, _fitting_pages(layout, SMALL_CACHE_BYTES, "--kv-cache-bytes", f"default {SMALL_CACHE_BYTES}"))
    _check_left(kept, cache, devices)
    share = cache.device_memory_utilization
    left = (min(int(device.limit_bytes * share) - device.in_use_bytes for device in devices) - kept) * len(devices)
    return _fitting_pages(layout, left, "--device-memory-utilization", f"{share} leaves {left} bytes for KV")


def _check_left(kept: int, cache: CacheConfig, devices: Sequence[DeviceMemory]) -> None:
    share = cache.device_memory_utilization
    fullest = min(devices, key=lambda device: int(device.limit_bytes * share) - device.in_use_bytes)
    usable = int(fullest.limit_bytes * share)
    if fullest.limit_bytes == 0:
        raise ConfigError(
            "--device-memory-utilization: the runtime does not say how much memory a device has, so there is no share of it; "
            "give --kv-cache-bytes or --num-pages"
        )
    if usable <= fullest.in_use_bytes + kept:
        raise ConfigError(
            f"--device-memory-utilization: {share} of a device's {_gib(fullest.limit_bytes)} is {_gib(usable)}, wanted more "
            f"than the {_gib(fullest.in_use_bytes)} in use (weights) and {_gib(kept)} for steps and KV on its way: nothing is "
            f"left for the pool; {_more_room(fullest, usable)}"
        )


def _more_room(device: DeviceMemory, usable: int) -> str:
    """What can help where nothing is left: not what is beside the weights where they alone are too much."""
    if device.in_use_bytes >= device.limit_bytes:
        return "use more devices"
    if device.in_use_bytes >= usable:
        return "raise it or use more devices"
    return "raise it, lower --max-num-seqs, --max-num-batched-tokens or --transfer-buffer-bytes, or use more devices"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _fitting_pages(layout: KVLayout, num_bytes: int, flag: str, got: str) -> int:
    """Pages in `num_bytes`, which come from `flag`. Raises ConfigError when it is less than a pool needs."""
    num_pages, needed = num_pages_for_bytes((layout,), num_bytes), MIN_PAGES * layout.bytes_per_page
    if num_pages < MIN_PAGES:
        raise ConfigError(
            f"{flag}: {got}, wanted at least {needed} bytes: {MIN_PAGES} pages of {layout.page_size} "
            f"tokens, {layout.bytes_per_page} bytes each (page 0 is never used); raise it or lower --page-size"
        )
    return num_pages
