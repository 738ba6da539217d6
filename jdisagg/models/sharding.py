"""Which logical axis is cut along which mesh axis: one table. Meshes have one axis, "tp"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdisagg.core.errors import ConfigError
from jdisagg.models.declare import Declared
from jdisagg.models.spec import ModelSpec

RULES: Mapping[str, str | None] = {
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",
    "mlp": "tp",
    "embed": None,
    "head_dim": None,
}


def make_mesh(devices: Sequence[Any], tp: int) -> Mesh:
    """A mesh over the first `tp` devices. Axis types are said: jax.make_mesh defaults to Explicit, this code relies on Auto."""
    if tp < 1 or len(devices) < tp:
        raise ConfigError(f"--tensor-parallel-size is {tp}, wanted 1 to {len(devices)}, the number of usable devices")
    return Mesh(np.asarray(devices[:tp]), ("tp",), axis_types=(AxisType.Auto,))


def param_sharding(mesh: Mesh, spec: ModelSpec, declared: Declared) -> NamedSharding:
    """Where one parameter lives. kv heads that do not divide by tp, and a vocabulary that does not, are replicated."""
    tp = mesh.shape["tp"]
    replicated = {"kv_heads"} if spec.attention.num_kv_heads % tp else set()
    if spec.vocab_size % tp:
        replicated.add("vocab")
    return NamedSharding(mesh, PartitionSpec(*(None if axis in replicated else RULES[axis] for axis in declared.axes)))
