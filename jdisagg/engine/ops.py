"""`AttentionOps` bound to one set of kernels, one KV layout and one mesh."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jdisagg.core.platforms import GPU_PLATFORMS
from jdisagg.kv.group import KVGroup
from jdisagg.kv.layout import TP_AXIS, KVLayout
from jdisagg.kv.pool import MIN_PAGES
from jdisagg.kv.quantise import quantise
from jdisagg.kv.spec import SCALES
from jdisagg.models.batch import AttentionOps, TokenBatch
from pallas_kernels import ref
from pallas_kernels.attention import attend, tpu_refuses
from pallas_kernels.blocks import BlockTable, tuned
from pallas_kernels.gpu_attention import gpu_refuses
from pallas_kernels.implementation import Implementation
from pallas_kernels.rows import Kind
from pallas_kernels.tpu_scales import store_scales
from pallas_kernels.tpu_write import slab_tokens
from pallas_kernels.write import write

log = logging.getLogger(__name__)

_ROWS = PartitionSpec(None, TP_AXIS)  # [T, heads, D]
_ALL = PartitionSpec()
_HOPPER = "9.0"
_SLOW = "KV cache is served by plain XLA, several times slower than the kernels"
_GPU_GENERATIONS = ("9", "10")  # Hopper, and Blackwell of data centres
Store = Callable[..., jax.Array]  # (array, layer, rows [T, K, F], pages, offsets, heads_major=) -> array


def choose_ops(layout: KVLayout, mesh: Mesh) -> AttentionOps:
    """The fastest kernels that serve `layout` on the platform of `mesh`: the one place where they are chosen."""
    device = mesh.devices.flat[0]
    implementation = kernels_of(device)
    if implementation == "ref":
        if device.platform != "cpu":
            log.warning("%s, as there are none for %s", _SLOW, device.device_kind)
        return RefOps(layout, mesh)
    if reason := (tpu_layout_refuses if implementation == "tpu" else gpu_layout_refuses)(layout):
        log.warning("%s: %s", _SLOW, reason)
        return RefOps(layout, mesh)
    if implementation == "gpu":
        return GpuOps(layout, mesh)
    return TpuOps(layout, mesh, table=tuned(device.device_kind))


def kernels_of(device: Any) -> Implementation:
    """What `device` has kernels for; GPUs with less shared memory than Hopper's would refuse ours when they compile them."""
    if device.platform == "tpu":
        return "tpu"
    if device.platform not in GPU_PLATFORMS or "nvidia" not in device.device_kind.lower():
        return "ref"
    capability = str(getattr(device, "compute_capability", _HOPPER))
    return "gpu" if capability.partition(".")[0] in _GPU_GENERATIONS else "ref"


def tpu_layout_refuses(layout: KVLayout) -> str | None:
    """Why the TPU kernels cannot serve `layout`, or None."""
    q, kv, dtype = _smallest(layout)
    return tpu_refuses(q, kv, jax.ShapeDtypeStruct((1, 1), jnp.int32), dtype=dtype, heads_major=layout.heads_major)


def gpu_layout_refuses(layout: KVLayout) -> str | None:
    """Why the GPU kernel cannot serve `layout`, or None."""
    q, kv, dtype = _smallest(layout)
    return gpu_refuses(q, kv, dtype=dtype, heads_major=layout.heads_major)


def _smallest(layout: KVLayout) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jnp.dtype]:
    """A query, the smallest cache, and what they are multiplied in."""
    kv = layout.abstract(MIN_PAGES).data
    dtype = jnp.dtype(jnp.bfloat16) if layout.spec.quantised else kv.dtype
    return jax.ShapeDtypeStruct((1, layout.num_stored_heads, layout.spec.features // 2), dtype), kv, dtype


@dataclass(frozen=True)
class RefOps:
    """Reference kernels; with several shards each works on its own heads and no collective is needed."""

    layout: KVLayout
    mesh: Mesh
    block_tokens: int = ref.BLOCK_TOKENS  # the attention loop's stride

    def write(self, kv: KVGroup, layer: int | jax.Array, k: jax.Array, v: jax.Array, batch: TokenBatch) -> KVGroup:
        """Store k, v [T, K, D] in the batch's pages; K counts each head once."""
        return _write_shards(self.layout, self.mesh, ref.store, (kv, layer, k, v), batch)

    def attend(
        self, q: jax.Array, kv: KVGroup, layer: int | jax.Array, batch: TokenBatch, *, scale: float, window: int | None
    ) -> jax.Array:
        """Causal attention of q [T, H, D] over the pages of each tile."""
        kernel = partial(
            _attend,
            scale=scale,
            window=window,
            heads_major=self.layout.heads_major,
            dtype=_product_dtype(self.layout, q),
            block_tokens=self.block_tokens,
        )
        arguments = (q, kv, jnp.asarray(layer, jnp.int32), batch.page_tables, batch.positions, batch.rows)
        if self.layout.num_shards == 1:
            return kernel(*arguments)
        specs = (_ROWS, self.layout.partition, _ALL, _ALL, _ALL, _ALL)
        return jax.shard_map(kernel, mesh=self.mesh, in_specs=specs, out_specs=_ROWS, check_vma=False)(*arguments)


@dataclass(frozen=True)
class TpuOps:
    """The Pallas kernels, for decode and for prefill."""

    layout: KVLayout
    mesh: Mesh
    table: BlockTable | None  # measured block sizes
    interpret: Any = False  # passed to Pallas

    def write(self, kv: KVGroup, layer: int | jax.Array, k: jax.Array, v: jax.Array, batch: TokenBatch) -> KVGroup:
        """See RefOps. A tile's tokens follow each other."""
        num_tiles = batch.page_tables.shape[0]
        most = slabs_touched(self.layout, batch.positions.shape[0] // num_tiles, num_tiles)
        store = partial(store_tpu, most_slabs=most, interpret=self.interpret)
        return _write_shards(self.layout, self.mesh, store, (kv, layer, k, v), batch)

    def attend(
        self, q: jax.Array, kv: KVGroup, layer: int | jax.Array, batch: TokenBatch, *, scale: float, window: int | None
    ) -> jax.Array:
        """See RefOps."""
        options = {"implementation": "tpu", "table": self.table, "interpret": self.interpret}
        return _attend_shards(self.layout, self.mesh, (q, kv, layer, batch), scale=scale, window=window, **options)


@dataclass(frozen=True)
class GpuOps:
    """The Pallas attention kernel, and XLA's scatter; plain attention only where a cache is too large for the kernel."""

    layout: KVLayout
    mesh: Mesh
    interpret: Any = False  # passed to Pallas

    def write(self, kv: KVGroup, layer: int | jax.Array, k: jax.Array, v: jax.Array, batch: TokenBatch) -> KVGroup:
        """See RefOps."""
        return RefOps(self.layout, self.mesh).write(kv, layer, k, v, batch)

    def attend(
        self, q: jax.Array, kv: KVGroup, layer: int | jax.Array, batch: TokenBatch, *, scale: float, window: int | None
    ) -> jax.Array:
        """See RefOps."""
        layout = self.layout
        *pages, heads, features = kv.data.shape
        local = jax.ShapeDtypeStruct((*pages, heads // layout.num_shards, features), kv.data.dtype)
        queries = jax.ShapeDtypeStruct((q.shape[0], q.shape[1] // layout.num_shards, q.shape[2]), q.dtype)
        if reason := gpu_refuses(queries, local, dtype=_product_dtype(layout, q), heads_major=layout.heads_major):
            log.warning("attention is served by plain XLA, several times slower than the kernel: %s", reason)
            return RefOps(layout, self.mesh).attend(q, kv, layer, batch, scale=scale, window=window)
        options = {"implementation": "gpu", "interpret": self.interpret}
        return _attend_shards(layout, self.mesh, (q, kv, layer, batch), scale=scale, window=window, **options)


def _attend_shards(
    layout: KVLayout, mesh: Mesh, what: tuple[jax.Array, KVGroup, int | jax.Array, TokenBatch], **options: Any
) -> jax.Array:
    """Attention of (q, kv, layer, batch) by kernel, every shard its own heads."""
    q, kv, layer, batch = what
    kind = Kind.DECODE if batch.page_tables.shape[0] == q.shape[0] else Kind.PREFILL
    kernel = partial(_attend_kernel, heads_major=layout.heads_major, kind=kind, dtype=_product_dtype(layout, q), **options)
    arguments = (q, kv, jnp.asarray(layer, jnp.int32), batch.page_tables, batch.rows)
    specs = (_ROWS, layout.partition, _ALL, _ALL, _ALL)
    return jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=_ROWS, check_vma=False)(*arguments)


def _write_shards(
    layout: KVLayout, mesh: Mesh, store: Store, new: tuple[KVGroup, int | jax.Array, jax.Array, jax.Array], batch: TokenBatch
) -> KVGroup:
    """Store (kv, layer, k, v) with `store`, every shard its own heads."""
    kv, layer, *both = new
    k, v = (jnp.repeat(x, layout.num_replicas, axis=1) for x in both)
    kernel = partial(_write, store=partial(store, heads_major=layout.heads_major), dtype=layout.dtype)
    arguments = (kv, jnp.asarray(layer, jnp.int32), k, v, batch.write_pages, batch.write_offsets)
    if layout.num_shards == 1:
        return kernel(*arguments)
    pool = layout.partition
    specs = (pool, _ALL, _ROWS, _ROWS, _ALL, _ALL)
    return jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=pool, check_vma=False)(*arguments)


def _write(  # noqa: PLR0917
    kv: KVGroup,
    layer: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    store: Store,
    dtype: jnp.dtype,
) -> KVGroup:
    """Store k, v [T, K, D] as `dtype`, quantising when the group has scales."""
    both = jnp.concatenate([k, v], axis=-1)
    rows = KVGroup(both.astype(dtype)) if kv.scales is None else KVGroup(*quantise(both))
    return jax.tree.map(lambda array, new: store(array, layer, new, pages, offsets), kv, rows)


def slabs_touched(layout: KVLayout, num_tokens: int, num_runs: int = 1) -> int:
    """How many slabs so many runs of consecutive tokens, which may begin within one, touch at most, and that of the null page,
    where padding goes."""
    slab = slab_tokens(layout.storage_dtype)
    return num_runs * ((num_tokens - 1 + slab - 1) // slab + 1) + 1


def store_tpu(
    array: jax.Array,
    layer: jax.Array,
    rows: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    most_slabs: int,
    heads_major: bool,
    interpret: Any,
) -> jax.Array:
    """Rows [T, K, F] of data or of scales by kernel; `most_slabs` bounds the slabs of both."""
    if array.shape[-1] == SCALES:
        most = min(most_slabs, rows.shape[0])
        return store_scales(array, layer, rows, pages, offsets, most_pages=most, interpret=interpret)
    options = {"most_slabs": most_slabs, "heads_major": heads_major, "interpret": interpret}
    return write(array, layer, rows, pages, offsets, implementation="tpu", **options)


def _attend(q: jax.Array, kv: KVGroup, *where: Any, **options: Any) -> jax.Array:
    """`ref.attend_tiles`; `where` is (layer, page tables, positions, rows)."""
    return ref.attend_tiles(q, kv.data, *where, **options, scales=kv.scales)


def _attend_kernel(q: jax.Array, kv: KVGroup, *where: Any, **options: Any) -> jax.Array:
    """`attend`; `where` is (layer, page tables, rows)."""
    return attend(q, kv.data, *where, **options, scales=kv.scales)


def _product_dtype(layout: KVLayout, q: jax.Array) -> jnp.dtype:
    """What queries meet keys in: the keys' dtype, or for int8 ones their own; but float16 would lose small probabilities with
    their scales."""
    if not layout.spec.quantised:
        return layout.dtype
    return jnp.dtype(jnp.float32) if q.dtype == jnp.float16 else q.dtype
