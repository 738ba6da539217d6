"""Parameters that are not there: shapes, dtypes and shardings of what `load_model` would put on a mesh."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh

from jdisagg.core.config import LayerLoop
from jdisagg.models.declare import Declared, Path, build
from jdisagg.models.sharding import param_sharding
from jdisagg.models.spec import ModelSpec
from jdisagg.models.stacking import over_layers


def abstract_params(spec: ModelSpec, mesh: Mesh, dtype: str, layer_loop: LayerLoop) -> dict[str, Any]:
    """The dict of `declare.build`, layers stacked for SCAN, with `jax.ShapeDtypeStruct` leaves."""

    def make(path: Path, declared: Declared) -> jax.ShapeDtypeStruct:
        shape, sharding = declared.shape, param_sharding(mesh, spec, declared)
        if layer_loop is LayerLoop.SCAN and path[0] == "layers":
            shape, sharding = (spec.num_layers, *shape), over_layers(sharding)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    params = build(spec, make)
    return {**params, "layers": params["layers"][0]} if layer_loop is LayerLoop.SCAN else params


def bytes_per_device(tree: Any) -> int:
    """Bytes that each device of the mesh holds of abstract arrays with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
