"""KV of tokens into the cache and out of it: XLA's gather and scatter, and where XLA would copy the cache, the write kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jdisagg.engine.ops import kernels_of, slabs_touched, store_tpu, tpu_layout_refuses
from jdisagg.kv.group import KVGroup
from jdisagg.kv.layout import HEADS_OF_PIECE, KVLayout

_ALL = PartitionSpec()


def scatter_tokens(layout: KVLayout, mesh: Mesh, kv: KVGroup, rows: KVGroup, where: jax.Array) -> KVGroup:
    """`kv` with rows [L, T, K, F] at `where` i32[2, T] (page, offset): a range of a sequence, whole pages, the null page."""
    if layout.spec.quantised and kernels_of(mesh.devices.flat[0]) == "tpu" and tpu_layout_refuses(layout) is None:
        return scatter_by_kernel(layout, mesh, kv, rows, where)
    return layout.scatter_tokens(mesh, kv, rows, where[0], where[1])


def scatter_by_kernel(
    layout: KVLayout, mesh: Mesh, kv: KVGroup, rows: KVGroup, where: jax.Array, *, interpret: Any = False
) -> KVGroup:
    """The same by `pallas_kernels.write`, a layer at a time."""
    kernel = partial(_store_layers, most_slabs=slabs_touched(layout, where.shape[1]), interpret=interpret)
    specs = (layout.partition, HEADS_OF_PIECE, _ALL)
    stored = jax.tree.map(lambda array: jnp.repeat(array, layout.num_replicas, axis=2), rows)
    return jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=layout.partition, check_vma=False)(kv, stored, where)


def _store_layers(kv: KVGroup, rows: KVGroup, where: jax.Array, **options: Any) -> KVGroup:
    def store(layer: jax.Array, kv: KVGroup) -> KVGroup:
        put = partial(store_tpu, heads_major=True, **options)
        return jax.tree.map(lambda array, new: put(array, layer, new[layer], where[0], where[1]), kv, rows)

    return lax.fori_loop(0, rows.data.shape[0], store, kv)
