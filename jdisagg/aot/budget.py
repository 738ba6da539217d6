"""What one engine puts on each of its devices: the memory rule of `jdisagg.engine.sizing`, asked about devices on paper."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.aot.abstract import ModelForm, bytes_per_device
from jdisagg.aot.accelerators import GIB, Accelerator
from jdisagg.aot.planned import PlannedEngine, planned_mesh
from jdisagg.core.config import Config
from jdisagg.core.errors import ConfigError
from jdisagg.engine.sizing import (
    DeviceMemory,
    EngineSizes,
    check_sizes,
    moving_bytes,
    pages_for,
    size_engine,
    steps_bytes,
    takes_share,
)
from jdisagg.kv.pool import MIN_PAGES
from jdisagg.models.limits import check_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Bytes on one device, and what they hold. `problem` is what the engine would refuse to start with."""

    limit_bytes: int | None  # that the runtime may use; None on CPU
    usable_bytes: int | None  # of it, by --device-memory-utilization
    weights_bytes: int
    steps_bytes: int  # kept free for decode state and steps
    moving_bytes: int  # kept free for KV on its way to and from peers and host memory
    page_bytes: int
    pool_bytes: int
    num_pages: int  # the null page included; 0 when nothing fits
    page_size: int  # tokens
    max_model_len: int  # tokens one request may have
    missing_bytes: int  # for weights, steps, KV on its way and the given pool, else one request of full length; 0 when it fits
    problem: str | None
    is_share: bool  # the pool is what is left of `usable_bytes`

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that fit."""
        return max(0, self.num_pages - 1) * self.page_size

    @property
    def full_requests(self) -> int:
        """Requests of `max_model_len` that fit at once."""
        return self.kv_tokens // self.max_model_len if self.max_model_len else 0

    @property
    def total_bytes(self) -> int:
        """All that the engine takes on a device."""
        return self.weights_bytes + self.steps_bytes + self.moving_bytes + self.pool_bytes


def make_budget(
    form: ModelForm, engine: PlannedEngine, config: Config, accelerator: Accelerator
) -> tuple[Budget, EngineSizes | None]:
    """The budget, and the engine's sizes unless it would refuse to start.

    Raises ConfigError for a model that cannot be cut over `engine.tp` devices.
    """
    check_model(config.model, form.spec, engine.tp)
    mesh = planned_mesh(accelerator.platform, engine.tp)
    layout = form.layout(mesh, config.cache.page_size)
    limit = accelerator.limit_bytes()
    weights = bytes_per_device(form.params(mesh))
    memory = None if limit is None else [DeviceMemory(limit_bytes=limit, in_use_bytes=weights)] * engine.tp
    sizes, problem = None, None
    try:
        sizes = size_engine(form.spec, layout, config, engine.role, lambda: memory)
        check_sizes(sizes, form.spec, layout, mesh, config=config, role=engine.role)
    except ConfigError as error:
        problem = error.message
    longest = config.model.max_model_len or form.spec.max_model_len
    page_bytes = layout.bytes_per_page // engine.tp
    usable = None if limit is None else _usable(limit, config)
    num_pages = 0 if sizes is None else sizes.num_pages
    for_steps, moving = steps_bytes(form.spec, layout, config, engine.role), moving_bytes(layout, config, engine.role)
    beside_pool = weights + for_steps + moving
    least = beside_pool + MIN_PAGES * page_bytes
    needed = beside_pool + max(MIN_PAGES, num_pages or pages_for(longest, layout.page_size)) * page_bytes
    missing = 0 if usable is None else max(0, needed - usable)
    if problem is None and missing:
        problem = _too_fixed(config, least, needed, usable or 0)
    budget = Budget(
        limit_bytes=limit,
        usable_bytes=usable,
        weights_bytes=weights,
        steps_bytes=for_steps,
        moving_bytes=moving,
        page_bytes=page_bytes,
        pool_bytes=num_pages * page_bytes,
        num_pages=num_pages,
        page_size=layout.page_size,
        max_model_len=longest if sizes is None else sizes.runner.max_model_len,
        missing_bytes=missing,
        problem=problem,
        is_share=limit is not None and takes_share(layout, config.cache),
    )
    return budget, sizes if problem is None else None


def _usable(limit: int, config: Config) -> int:
    """A pool of a fixed size may use all of a device, one by share only its share."""
    cache = config.cache
    is_fixed = cache.num_pages is not None or cache.kv_cache_bytes is not None
    return limit if is_fixed else int(limit * cache.device_memory_utilization)


def _too_fixed(config: Config, least: int, needed: int, usable: int) -> str:
    """`least`: what the engine needs with the smallest pool."""
    flag = "--num-pages" if config.cache.num_pages is not None else "--kv-cache-bytes"
    return (
        f"{flag}: weights, pool, steps and KV on its way need {needed / GIB:.2f} GiB of a device, it has {usable / GIB:.2f}; "
        f"{'lower it' if least <= usable else 'no pool is small enough, use more devices'}"
    )
