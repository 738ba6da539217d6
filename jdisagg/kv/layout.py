"""The axis order of the KV array, which is a secret of this file and of the kernels it parametrises.

Outside, KV is `[L, T, K, F]` pieces and (page, offset) pairs. Inside it is one array per group (and one like it, with F = 2,
for the scales of int8 data):

    tokens-major [L, P, S, K, F]    GPU
    heads-major  [L, P, K, S, F]    CPU (decode attention 2 against 15 ms), TPU (a page is one matrix of K * S rows for free;
                                    tokens-major copies the cache for that below eight local heads)

K here counts replicas: with fewer kv heads than tensor-parallel shards each head is stored `num_replicas` times.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdisagg.core.errors import ConfigError
from jdisagg.kv.group import KVGroup
from jdisagg.kv.spec import SCALES, KVSpec

TP_AXIS = "tp"
LANES = 128  # of a TPU's registers
_ALL = PartitionSpec()
HEADS_OF_PIECE = PartitionSpec(None, None, TP_AXIS)  # [L, T, K, F]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """How one group lies in memory on one mesh."""

    spec: KVSpec
    page_size: int
    num_shards: int  # devices on the mesh axis "tp"
    heads_major: bool
    as_bits: bool  # the array holds 16-bit floats as uint16: XLA:CPU widens a bfloat16 cache to float32 at every access
    is_turned: bool = False  # XLA:TPU turns the whole cache around in every step, into copies of two to four times its size

    @property
    def num_replicas(self) -> int:
        """Copies of each kv head."""
        return max(1, self.num_shards // self.spec.num_kv_heads)

    @property
    def num_stored_heads(self) -> int:
        """Heads of the array, replicas included."""
        return self.spec.num_kv_heads * self.num_replicas

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, stored heads and devices."""
        return self.page_size * self.spec.bytes_per_token * self.num_replicas

    @property
    def dtype(self) -> jnp.dtype:
        """Element type."""
        return jnp.dtype(self.spec.dtype)

    @property
    def storage_dtype(self) -> jnp.dtype:
        """Type of the array itself."""
        return jnp.dtype(jnp.uint16) if self.as_bits else self.dtype

    def abstract(self, num_pages: int) -> KVGroup:
        """Shapes and dtypes of the group's arrays with `num_pages` pages, the null page included."""
        inner = (self.num_stored_heads, self.page_size) if self.heads_major else (self.page_size, self.num_stored_heads)
        return self._group((self.spec.num_layers, num_pages, *inner), self.storage_dtype)

    def abstract_rows(self, num_tokens: int) -> KVGroup:
        """Shapes and dtypes of the KV of tokens, as `gather_tokens` returns it."""
        return self._group((self.spec.num_layers, num_tokens, self.spec.num_kv_heads), self.dtype)

    def _group(self, shape: tuple[int, ...], dtype: jnp.dtype) -> KVGroup:
        data = jax.ShapeDtypeStruct((*shape, self.spec.features), dtype)
        return KVGroup(data, jax.ShapeDtypeStruct((*shape, SCALES), jnp.float32) if self.spec.quantised else None)

    @property
    def partition(self) -> PartitionSpec:
        """Heads over "tp"."""
        return PartitionSpec(None, None, TP_AXIS) if self.heads_major else PartitionSpec(None, None, None, TP_AXIS)

    @property
    def piece_shards(self) -> int:
        """Devices that share an exported or imported piece; 1 where each has all of it, since heads are replicated."""
        return 1 if self.num_replicas > 1 else self.num_shards

    def piece_sharding(self, mesh: Mesh) -> NamedSharding:
        """Sharding of exported and imported pieces [L, T, K, F]: heads over "tp", whole where heads are replicated."""
        return NamedSharding(mesh, _ALL if self.piece_shards == 1 else HEADS_OF_PIECE)

    def gather_tokens(self, mesh: Mesh, kv: KVGroup, pages: jax.Array, offsets: jax.Array) -> KVGroup:
        """KV [L, T, K, F] of the tokens at (pages i32[T], offsets i32[T]); a replicated head is read once."""
        kernel = jax.shard_map(
            self._gather, mesh=mesh, in_specs=(self.partition, _ALL, _ALL), out_specs=HEADS_OF_PIECE, check_vma=False
        )
        once = jax.tree.map(lambda array: kernel(array, pages, offsets)[:, :, :: self.num_replicas], kv)
        return KVGroup(_cast_bits(once.data, self.dtype), once.scales)

    def scatter_tokens(self, mesh: Mesh, kv: KVGroup, rows: KVGroup, pages: jax.Array, offsets: jax.Array) -> KVGroup:
        """Store KV rows [L, T, K, F] at (pages i32[T], offsets i32[T]); the inverse of `gather_tokens`."""
        specs = (self.partition, HEADS_OF_PIECE, _ALL, _ALL)
        kernel = jax.shard_map(self._scatter, mesh=mesh, in_specs=specs, out_specs=self.partition, check_vma=False)

        def store(array: jax.Array, new: jax.Array) -> jax.Array:
            return kernel(array, _cast_bits(jnp.repeat(new, self.num_replicas, axis=2), array.dtype), pages, offsets)

        return jax.tree.map(store, kv, rows)

    def _gather(self, kv: jax.Array, pages: jax.Array, offsets: jax.Array) -> jax.Array:
        return kv.at[self._index(kv, pages, offsets)].get(mode="clip")

    def _scatter(self, kv: jax.Array, rows: jax.Array, pages: jax.Array, offsets: jax.Array) -> jax.Array:
        return kv.at[self._index(kv, pages, offsets)].set(rows, mode="drop")

    def _index(self, kv: jax.Array, pages: jax.Array, offsets: jax.Array) -> tuple[jax.Array, ...]:
        """Indices of [L, T, K] rows of F, every axis named: XLA:TPU copies the cache for a slice between indices."""
        layers = jnp.arange(kv.shape[0])[:, None, None]
        heads = jnp.arange(kv.shape[2 if self.heads_major else 3])[None, None, :]
        pages, offsets = pages[None, :, None], offsets[None, :, None]
        return (layers, pages, heads, offsets) if self.heads_major else (layers, pages, offsets, heads)


def choose_layout(spec: KVSpec, mesh: Mesh, page_size: int) -> KVLayout:
    """The fastest layout for the mesh's platform. Raises ConfigError when pages are too small for int8 on TPU, where scales in
    registers half empty would take more memory than there is."""
    num_shards, heads = mesh.shape.get(TP_AXIS, 1), spec.num_kv_heads
    assert not (heads % num_shards and num_shards % heads), f"{heads} kv heads do not divide over {num_shards} shards"
    platform = mesh.devices.flat[0].platform
    heads_major = platform in ("cpu", "tpu")
    if platform == "tpu" and spec.quantised and page_size % LANES:
        raise ConfigError(
            f"--page-size: got {page_size}, wanted a multiple of {LANES} for int8 on TPU, whose steps would need copies of all "
            f"scales larger than the cache; give --page-size {LANES}"
        )
    as_bits = platform == "cpu" and jnp.dtype(spec.dtype).itemsize == 2
    return KVLayout(
        spec=spec,
        page_size=page_size,
        num_shards=num_shards,
        heads_major=heads_major,
        as_bits=as_bits,
        is_turned=platform == "tpu" and spec.features % LANES != 0,
    )


def _cast_bits(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)
