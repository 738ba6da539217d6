"""From a loaded model and the configuration to a `ModelRunner`: layout, sizes and buckets are chosen here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from jax.sharding import Mesh

from jdisagg.core.config import Config
from jdisagg.core.errors import ConfigError, NoMemory
from jdisagg.core.requests import Role
from jdisagg.engine.device import Device
from jdisagg.engine.grammar_rows import Grammars
from jdisagg.engine.ops import choose_ops
from jdisagg.engine.runner import ModelRunner
from jdisagg.engine.sizing import DeviceMemory, EngineSizes, check_sizes, pages_for, size_engine
from jdisagg.kv.layout import LANES, choose_layout
from jdisagg.models.decoder import DecoderModel
from jdisagg.models.load import LoadedModel

log = logging.getLogger(__name__)


def make_runner(loaded: LoadedModel, mesh: Mesh, config: Config, role: Role, grammars: Grammars | None = None) -> ModelRunner:
    """Allocate pool and state on `mesh` and bind the steps; nothing is compiled yet (see `warm_up`).

    Raises ConfigError naming the flag when sizes contradict each other or do not fit, NoMemory where nobody gave the pool's.
    """
    layout = choose_layout(loaded.spec.kv_spec(loaded.kv_dtype), mesh, config.cache.page_size)
    sizes = size_engine(loaded.spec, layout, config, role, partial(_memory, mesh))
    check_sizes(sizes, loaded.spec, layout, mesh, config=config, role=role)
    if layout.is_turned:
        log.warning(
            "%d KV pages, as every step copies the cache (keys and values are %d wide, wanted a multiple of %d); "
            "--kv-cache-bytes gives another size, of which four more have to fit",
            *(sizes.num_pages, layout.spec.features, LANES),
        )
    _remark(loaded.spec.max_model_len, config, layout.page_size, sizes)
    model = DecoderModel(loaded.spec, choose_ops(layout, mesh), loaded.layer_loop)
    try:
        device = Device(model, loaded.params, layout, mesh, sizes.device, num_pages=sizes.num_pages)
    except ConfigError as error:
        if config.cache.num_pages is not None or config.cache.kv_cache_bytes is not None:
            raise
        raise NoMemory(error.message) from error  # a share that is there, as a rule: somebody else has some of it now
    return ModelRunner(device, sizes.runner, grammars)


def _remark(longest: int, config: Config, page_size: int, sizes: EngineSizes) -> None:
    """Say so when the pool is smaller than one request of the model's own length, and nobody chose a shorter one."""
    if config.model.max_model_len is None and sizes.runner.max_model_len < longest:
        log.warning(
            "%d KV pages of %d tokens hold %d of the model's %d: longer requests are refused; --num-pages %d would serve all",
            *(sizes.num_pages, page_size, sizes.runner.max_model_len, longest, pages_for(longest, page_size)),
        )


def _memory(mesh: Mesh) -> Sequence[DeviceMemory] | None:
    """What the runtime says of every device; None on CPU, where it knows nothing."""
    devices = mesh.devices.flat
    if devices[0].platform == "cpu":
        return None
    stats = [device.memory_stats() or {} for device in devices]
    return [
        DeviceMemory(limit_bytes=int(each.get("bytes_limit", 0)), in_use_bytes=int(each.get("bytes_in_use", 0)))
        for each in stats
    ]
