"""Abstract devices of a topology, from the compiler that describes it: libtpu, the CUDA plugin, or this machine's CPU.

`jdisagg.aot.environment` must have been prepared before jax is imported: jax itself stays on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from jdisagg.aot.accelerators import Topology
from jdisagg.core.errors import ConfigError

_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def abstract_devices(topology: Topology, count: int) -> Sequence[Any]:
    """The first `count` devices. Raises ConfigError when there are fewer, or their compiler is not installed."""
    if count > topology.num_devices:
        raise ConfigError(
            f"--tensor-parallel-size: got {count} devices to use, --topology {topology} has {topology.num_devices}; "
            "lower --tp or name a larger topology"
        )
    platform = topology.accelerator.platform
    if platform == "cpu":
        return jax.devices("cpu")[:count]
    return (_tpu_devices(topology) if platform == "tpu" else _cuda_devices(topology))[:count]


def _tpu_devices(topology: Topology) -> Sequence[Any]:
    if find_spec("libtpu") is None:
        raise ConfigError(
            "--topology: TPU topologies need the TPU compiler, libtpu; in a checkout: python -m pip install -c "
            "constraints.txt -e '.[aot]'; or add --no-compile for what arithmetic alone can tell"
        )
    name = f"{topology.accelerator.name}:{topology.compile_shape}"
    return _describe(topology, "tpu", {"topology_name": name})


def _cuda_devices(topology: Topology) -> Sequence[Any]:
    if all(find_spec(name) is None for name in _CUDA_PLUGINS):
        raise ConfigError(
            f"--topology: {topology} needs the CUDA compiler; install jax-cuda13-plugin and jax-cuda13-pjrt of jax's version "
            "(no GPU is needed), or add --no-compile for what arithmetic alone can tell"
        )
    accelerator = topology.accelerator
    shape = f"1x1x{topology.num_devices}"
    return _describe(topology, "cuda", {"target_config": accelerator.target_text(), "topology": shape})


def _describe(topology: Topology, platform: str, options: Mapping[str, str]) -> Sequence[Any]:
    try:
        return topologies.get_topology_desc(platform=platform, **options).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--topology: the compiler of {topology.accelerator.title} cannot describe {topology}: {first}; try another shape"
        ) from error
