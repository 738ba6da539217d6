"""What can be found wrong before jax is imported: taken ports, a model that is not there or not whole.

Costs a few tenths of a second. Of a Hub id that is not cached the small files are fetched here, its weights not: that takes
minutes, in which probes want an answer.
"""

from __future__ import annotations

from jdisagg.api.listening import listen
from jdisagg.core.config import Config
from jdisagg.core.errors import ConfigError
from jdisagg.models.formats import choose_format
from jdisagg.models.limits import check_model
from jdisagg.models.resolve import has_weights, local_model, read_config, resolve_model
from jdisagg.models.safetensors_files import check_layers
from jdisagg.models.spec import ModelSpec
from jdisagg.serve.text_edge import read_text_model


def check_worker(config: Config) -> None:
    """Raise ConfigError for what a worker would refuse only after importing jax. Ports are bound for good later."""
    for flag, port in (("--port", config.server.port), ("--grpc-port", config.server.grpc_port)):
        if port:
            listen(config.server.host, port, flag=flag).close()
    _check_pool(config)
    name = config.model.model
    directory = resolve_model(name, weights=False)
    spec = ModelSpec.from_config(read_config(directory))
    tps = (config.prefill_tp, config.decode_tp) if config.role == "colocated" else (config.model.tensor_parallel_size,)
    for tp in tps:
        check_model(config.model, spec, tp)
    if config.role != "prefill":
        read_text_model(directory)
    if local_model(name) is None and not has_weights(directory):
        return  # `load_model` fetches and checks them, while probes are answered
    if choose_format(config.model.load_format, directory) == "safetensors":
        check_layers(directory, spec.num_layers)


def _check_pool(config: Config) -> None:
    cache, wanted = config.cache, config.model.max_model_len
    if cache.num_pages is None or wanted is None:
        return
    holds = (cache.num_pages - 1) * cache.page_size
    if 0 < holds < wanted:
        raise ConfigError(
            f"--max-model-len: got {wanted}, but a pool of {cache.num_pages} pages of {cache.page_size} tokens holds {holds}; "
            f"lower it to {holds}, or give --num-pages {-(-wanted // cache.page_size) + 1}"
        )
