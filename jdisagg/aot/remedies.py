"""What would make an engine fit: single changes, each tried by the same arithmetic that refused it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jdisagg.aot.abstract import ModelForm
from jdisagg.aot.accelerators import Accelerator, read_accelerators
from jdisagg.aot.budget import make_budget
from jdisagg.aot.planned import PlannedEngine, planned_engines
from jdisagg.core.config import Config
from jdisagg.core.errors import ConfigError
from jdisagg.core.requests import Role
from jdisagg.kv.spec import ITEM_BYTES
from jdisagg.models.form import choose_dtypes

_SHARES = (0.95, 0.98)
_GPU_SHARE = 0.95
_PAGE_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # smaller ones, which some kernels do not serve, waste less and take longer


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One change, and the KV that fits with it."""

    change: str
    kv_tokens: int
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    change: str
    form: ModelForm
    engine: PlannedEngine
    config: Config
    accelerator: Accelerator


def remedies(form: ModelForm, engine: PlannedEngine, config: Config, accelerator: Accelerator) -> list[Remedy]:
    """The changes that help, in the order in which one would try them; of each kind the smallest."""
    found: dict[str, Remedy] = {}
    for kind, attempt in _attempts(_Attempt(change="", form=form, engine=engine, config=config, accelerator=accelerator)):
        if kind in found:
            continue
        try:
            budget, _ = make_budget(attempt.form, attempt.engine, attempt.config, attempt.accelerator)
        except ConfigError:
            continue  # this model cannot be cut that way
        if budget.problem is None:
            found[kind] = Remedy(change=attempt.change, kv_tokens=budget.kv_tokens, max_model_len=budget.max_model_len)
    return list(found.values())


def _attempts(base: _Attempt) -> Iterator[tuple[str, _Attempt]]:
    config = base.config
    yield from _by_share(base)
    for tokens in _halves(config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs):
        yield "tokens", _set(base, f"--max-num-batched-tokens {tokens}", "scheduler", max_num_batched_tokens=tokens)
    for slots in _halves(config.scheduler.max_num_seqs, 1):
        yield "slots", _set(base, f"--max-num-seqs {slots}", "scheduler", max_num_seqs=slots)
    for length in _halves(config.model.max_model_len or 0, 256):
        yield "length", _set(base, f"--max-model-len {length}", "model", max_model_len=length)
    for size in _PAGE_SIZES:
        if size != config.cache.page_size:
            yield "page", _set(base, f"--page-size {size}", "cache", page_size=size)
    for size in _halves(config.cache.kv_cache_bytes or 0, 2**20):
        yield "pool", _set(base, f"--kv-cache-bytes {size}", "cache", kv_cache_bytes=size)
    for pages in _halves(config.cache.num_pages or 0, 2):
        yield "pool", _set(base, f"--num-pages {pages}", "cache", num_pages=pages)
    if base.form.dtype == "float32":
        _, kv_dtype = choose_dtypes(replace(config.model, dtype="bfloat16"), base.accelerator.platform)  # it may follow
        form = replace(base.form, dtype="bfloat16", kv_dtype=kv_dtype)
        yield "dtype", replace(base, change="--dtype bfloat16", form=form)
    if base.form.kv_dtype != "int8":
        form = replace(base.form, kv_dtype="int8")
        yield "kv", replace(base, change="--kv-cache-dtype int8", form=form)
    for other in (base.accelerator, *(each for each in read_accelerators().values() if each.name != base.accelerator.name)):
        for tp in _tps(base, other):
            flag, changed = _cut(base, tp)
            if not _is_planned(changed, other):
                continue
            engine = replace(base.engine, tp=tp, devices=tuple(range(tp)))
            size = "" if other is base.accelerator else f", {other.memory_gib:g} GiB each"
            named = "" if base.config.device.devices is None else ", and other --devices"
            text = f"{flag} {tp}{named} ({tp} x {other.title}{size})"
            yield f"on {other.name}", replace(base, change=text, engine=engine, accelerator=other)


def _cut(base: _Attempt, tp: int) -> tuple[str, Config]:
    """The flag that cuts the engine over `tp` devices, whichever they are, and a configuration with it."""
    config = replace(base.config, device=replace(base.config.device, devices=None))
    if config.role not in ("local", "colocated"):
        return "--tp", replace(config, model=replace(config.model, tensor_parallel_size=tp))
    if base.engine.role is Role.PREFILL:
        return "--prefill-tp", replace(config, local=replace(config.local, prefill_tp=tp))
    return "--decode-tp", replace(config, local=replace(config.local, decode_tp=tp))


def _is_planned(config: Config, accelerator: Accelerator) -> bool:
    """Whether one host has the devices for all that the configuration starts: that some share theirs is no advice."""
    host = accelerator.largest_host
    try:
        return host is not None and sum(engine.tp for engine in planned_engines(config, host)) <= host.num_devices
    except ConfigError:
        return False


def _tps(base: _Attempt, accelerator: Accelerator) -> Iterator[int]:
    """Numbers of devices of one host whose memory holds at least the weights; none on CPU."""
    limit, tp = accelerator.limit_bytes(), base.engine.tp * 2 if accelerator is base.accelerator else 1
    num_bytes, host = base.form.num_params * ITEM_BYTES[base.form.dtype], accelerator.largest_host
    while limit is not None and host is not None and tp <= host.num_devices:
        if num_bytes < limit * tp:
            yield tp
        tp *= 2


def _by_share(base: _Attempt) -> Iterator[tuple[str, _Attempt]]:
    for share in _SHARES:
        if share > base.config.cache.device_memory_utilization:
            change = f"--device-memory-utilization {share}"
            yield "share", _set(base, change, "cache", device_memory_utilization=share)
    if base.accelerator.runtime_share < _GPU_SHARE:
        raised = replace(base.accelerator, runtime_share=_GPU_SHARE)
        yield "runtime", replace(base, change=f"XLA_CLIENT_MEM_FRACTION={_GPU_SHARE} in the environment", accelerator=raised)


def _set(base: _Attempt, change: str, section: str, **values: Any) -> _Attempt:
    part = replace(getattr(base.config, section), **values)
    return replace(base, change=change, config=replace(base.config, **{section: part}))


def _halves(value: int, least: int) -> Iterator[int]:
    while value // 2 >= least:
        value //= 2
        yield value
