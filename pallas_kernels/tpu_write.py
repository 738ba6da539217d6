"""KV write for TPU: new rows are merged into slabs, the smallest piece of a page that a chip can copy.

    slab = s tokens of all kv heads of one layer, [K, s, F]; s rows fill a register: 8 of float32, 16 of bfloat16, 32 of int8

Tokens are sorted by slab, so every slab is read, merged and written once and no two steps of the grid touch the same one:
Pallas may fetch the next while it stores the last. Within a slab, tokens that are not new keep what they hold.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

PACKED_BYTES = 32  # of a lane: a register's sublanes, 4 bytes each


def slab_tokens(dtype: Any) -> int:
    """Tokens of a slab; pages must be whole slabs."""
    return PACKED_BYTES // jnp.dtype(dtype).itemsize


def store_slabs(
    kv: jax.Array,
    layer: jax.Array,
    rows: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    most_slabs: int,
    tokens: int,
    interpret: Any,
) -> jax.Array:
    """`kv` [L, P, K, S, F] with rows [T, K, F] at (pages i32[T], offsets i32[T]) of one layer; in place when donated.

    Positions are distinct, except on pages whose content does not matter. `most_slabs` bounds how many slabs of `tokens` tokens
    they touch: those beyond it are not written. Pages from P on are left out.
    """
    per_page = kv.shape[3] // tokens
    in_slabs = pages * per_page + offsets // tokens
    slabs, source, num_runs = runs_of(
        jnp.where(pages < kv.shape[1], in_slabs, kv.shape[1] * per_page),
        offsets % tokens,
        kv.shape[1] * per_page,
        tokens,
        most_slabs,
    )
    bits = jnp.sum((source >= 0).astype(jnp.uint32) << jnp.arange(tokens, dtype=jnp.uint32)[None, :], axis=1).astype(jnp.int32)
    new = rows.astype(kv.dtype)[jnp.maximum(source, 0)].swapaxes(1, 2)  # [R, K, s, F]
    block = (1, 1, kv.shape[2], tokens, kv.shape[4])

    def of_cache(item: jax.Array, slabs: Any, bits: Any, layer: Any) -> tuple[Any, ...]:
        del bits
        return layer[0], slabs[item] // per_page, 0, lax.rem(slabs[item], per_page), 0

    return pl.pallas_call(
        _merge,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(jnp.maximum(num_runs, 1),),  # of none, slab 0 keeps what it holds
            in_specs=[pl.BlockSpec((1, *block[2:]), lambda item, *_: (item, 0, 0, 0)), pl.BlockSpec(block, of_cache)],
            out_specs=pl.BlockSpec(block, of_cache),
        ),
        out_shape=jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="kv_write",
    )(slabs, bits, layer.reshape(1), new, kv)


def runs_of(
    slab: jax.Array, offsets: jax.Array, nowhere: int, tokens: int, most: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens by slab i32[T]: the slabs touched, i32[most]; which token is new at each of their places, i32[most, tokens] or -1;
    how many slabs they are. Numbers from `nowhere` on are left out."""
    slab = jnp.minimum(slab, nowhere)
    order = jnp.argsort(slab)
    ordered = slab[order]
    run = jnp.cumsum(jnp.concatenate([jnp.zeros(1, jnp.int32), (ordered[1:] != ordered[:-1]).astype(jnp.int32)]))
    run = jnp.where(ordered == nowhere, most, run)
    slabs = jnp.zeros(most, jnp.int32).at[run].set(ordered, mode="drop")
    source = jnp.full((most, tokens), -1, jnp.int32).at[run, offsets[order]].set(order, mode="drop")
    return slabs, source, jnp.minimum(jnp.max(jnp.where(ordered == nowhere, -1, run), initial=-1) + 1, most)


def _merge(  # noqa: PLR0917
    slabs: Any, bits: Any, layer: Any, new: Any, old: Any, out: Any
) -> None:
    """One slab: refs in SMEM (slabs, bits, layer) and VMEM (new, old, out)."""
    del slabs, layer
    here = new.shape[1:]
    token = lax.broadcasted_iota(jnp.int32, here, 1)
    mask = lax.rem(lax.shift_right_logical(jnp.full(here, bits[pl.program_id(0)], jnp.int32), token), 2) != 0
    wide = (
        jnp.int32 if jnp.issubdtype(new.dtype, jnp.integer) else jnp.float32
    )  # selecting packed rows is not supported everywhere
    out[0, 0] = jnp.where(mask, new[0].astype(wide), old[0, 0].astype(wide)).astype(out.dtype)
