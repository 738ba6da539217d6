"""`AttentionOps` bound to one set of kernels, one KV layout and one mesh."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jdisagg.kv.group import KVGroup
from jdisagg.kv.layout import TP_AXIS, KVLayout
from jdisagg.kv.quantise import quantise
from jdisagg.models.batch import AttentionOps, TokenBatch
from pallas_kernels import ref
from pallas_kernels.tpu_decode import decode_attend

_ROWS = PartitionSpec(None, TP_AXIS)  # [T, heads, D]
_ALL = PartitionSpec()
_LANES = 128  # the TPU kernel's head dimension is a multiple of this


def choose_ops(layout: KVLayout, mesh: Mesh) -> AttentionOps:
    """The fastest kernels that serve `layout` on the platform of `mesh`."""
    fits = layout.spec.features % (2 * _LANES) == 0 and not layout.spec.quantised
    return TpuOps(layout, mesh) if fits and mesh.devices.flat[0].platform == "tpu" else RefOps(layout, mesh)


class RefOps:
    """Reference kernels; with several shards each works on its own heads and no collective is needed."""

    def __init__(self, layout: KVLayout, mesh: Mesh, *, block_tokens: int = ref.BLOCK_TOKENS) -> None:
        """Bind to `layout` on `mesh`; `block_tokens` is the attention loop's stride."""
        self._layout = layout
        self._mesh = mesh
        self._block_tokens = block_tokens

    def write(self, kv: KVGroup, layer: int | jax.Array, k: jax.Array, v: jax.Array, batch: TokenBatch) -> KVGroup:
        """Store k, v [T, K, D] in the batch's pages; K counts each head once."""
        replicas = self._layout.num_replicas
        k, v = jnp.repeat(k, replicas, axis=1), jnp.repeat(v, replicas, axis=1)
        kernel = partial(_write, heads_major=self._layout.heads_major, dtype=self._layout.dtype)
        arguments = (kv, jnp.asarray(layer, jnp.int32), k, v, batch.write_pages, batch.write_offsets)
        if self._layout.num_shards == 1:
            return kernel(*arguments)
        pool = self._layout.partition
        specs = (pool, _ALL, _ROWS, _ROWS, _ALL, _ALL)
        return jax.shard_map(kernel, mesh=self._mesh, in_specs=specs, out_specs=pool)(*arguments)

    def attend(
        self, q: jax.Array, kv: KVGroup, layer: int | jax.Array, batch: TokenBatch, *, scale: float, window: int | None
    ) -> jax.Array:
        """Causal attention of q [T, H, D] over the pages of each tile."""
        kernel = partial(
            _attend,
            scale=scale,
            window=window,
            heads_major=self._layout.heads_major,
            dtype=_product_dtype(q) if self._layout.spec.quantised else self._layout.dtype,
            block_tokens=self._block_tokens,
        )
        arguments = (q, kv, jnp.asarray(layer, jnp.int32), batch.page_tables, batch.positions)
        if self._layout.num_shards == 1:
            return kernel(*arguments)
        specs = (_ROWS, self._layout.partition, _ALL, _ALL, _ALL)
        return jax.shard_map(kernel, mesh=self._mesh, in_specs=specs, out_specs=_ROWS, check_vma=False)(*arguments)


class TpuOps:
    """The Pallas kernel where every query is a tile of its own (decode, `exact`), the plain kernels elsewhere."""

    def __init__(self, layout: KVLayout, mesh: Mesh) -> None:
        """Bind to `layout` on `mesh`."""
        self._layout = layout
        self._mesh = mesh
        self._plain = RefOps(layout, mesh)

    def write(self, kv: KVGroup, layer: int | jax.Array, k: jax.Array, v: jax.Array, batch: TokenBatch) -> KVGroup:
        """See RefOps."""
        return self._plain.write(kv, layer, k, v, batch)

    def attend(
        self, q: jax.Array, kv: KVGroup, layer: int | jax.Array, batch: TokenBatch, *, scale: float, window: int | None
    ) -> jax.Array:
        """See RefOps."""
        if batch.page_tables.shape[0] != q.shape[0]:
            return self._plain.attend(q, kv, layer, batch, scale=scale, window=window)
        kernel = partial(decode_attend, scale=scale, window=window, heads_major=self._layout.heads_major)
        arguments = (q, kv.data, jnp.asarray(layer, jnp.int32), batch.page_tables, batch.positions)
        specs = (_ROWS, self._layout.partition, _ALL, _ALL, _ALL)
        return jax.shard_map(kernel, mesh=self._mesh, in_specs=specs, out_specs=_ROWS, check_vma=False)(*arguments)


def _write(  # noqa: PLR0917
    kv: KVGroup,
    layer: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    heads_major: bool,
    dtype: jnp.dtype,
) -> KVGroup:
    """`ref.write`, quantising when the group has scales."""
    if kv.scales is None:
        return KVGroup(ref.write(kv.data, layer, k, v, pages, offsets, heads_major=heads_major, dtype=dtype))
    rows = KVGroup(*quantise(jnp.concatenate([k, v], axis=-1)))
    store = partial(ref.store, heads_major=heads_major)
    return jax.tree.map(lambda array, new: store(array, layer, new, pages, offsets), kv, rows)


def _attend(q: jax.Array, kv: KVGroup, *where: jax.Array, **options: Any) -> jax.Array:
    """`ref.attend`; `where` is (layer, page tables, positions)."""
    return ref.attend(q, kv.data, *where, **options, scales=kv.scales)


def _product_dtype(q: jax.Array) -> jnp.dtype:
    """What queries meet int8 keys in: their own dtype, but float16 would lose small probabilities with their scales."""
    return jnp.dtype(jnp.float32) if q.dtype == jnp.float16 else q.dtype
