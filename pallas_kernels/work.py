"""The work list of ragged attention: rows cut at the borders of blocks of queries, in order.

    blocks of t queries   |   block 0   |   block 1   |   block 2   |
    rows                  | row 0 |    row 1    | r2 |  row 3       |
    items (block, row)     (0,0) (0,1)  (1,1)(1,2)(1,3)  (2,3)

An item names the queries [low, high) of its block that are its row's, and the blocks of keys [first, stop) they can see.
Items that touch one block follow each other, so its output stays on the chip until it is complete. There are never more than
blocks + rows - 1; those left over name the last real item's block and have no queries and no keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.rows import Rows

LOWEST = -1e30  # a score that is none; finite: exp(LOWEST - LOWEST) must be 1, not NaN
# Rows of the array that carries a work list to the chip's scalar memory.
ROW, BLOCK, OFFSET, LOW, HIGH, FIRST, STOP, TURN = range(8)


def visible(distance: jax.Array, window: int | None) -> jax.Array:
    """May a query see the key that is so many tokens before it?"""
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Work:
    """W items; a block is a block of queries, keys are counted in blocks of their own."""

    row: jax.Array  # i32[W]
    block: jax.Array  # i32[W]
    offset: jax.Array  # i32[W]; position that query 0 of the block would have in the row's sequence; may be negative
    low: jax.Array  # i32[W]
    high: jax.Array  # i32[W]
    first: jax.Array  # i32[W]
    stop: jax.Array  # i32[W]
    num_items: jax.Array  # i32[]; real ones

    @property
    def packed(self) -> jax.Array:
        """i32[8, W + 1] by the constants above; one more item without work makes "the next item" always exist.

        TURN is the number of blocks of keys before the item: its parity says which of two buffers is next.
        """
        keys = self.stop - self.first
        fields = (self.row, self.block, self.offset, self.low, self.high, self.first, self.stop, jnp.cumsum(keys) - keys)
        return jnp.pad(jnp.stack(fields).astype(jnp.int32), ((0, 0), (0, 1)))


def plan_work(rows: Rows, *, num_queries: int, query_block: int, key_block: int, window: int | None) -> Work:
    """Cut `rows` over `num_queries` queries into items of at most `query_block` queries, with keys in blocks of `key_block`."""
    num_blocks, num_rows = -(-num_queries // query_block), rows.starts.shape[0]
    most = num_blocks if query_block == 1 else num_blocks + num_rows - 1
    top = rows.starts // query_block
    pieces = jnp.where(rows.counts > 0, (rows.stops - 1) // query_block - top + 1, 0)
    upto = jnp.cumsum(pieces)
    index = jnp.arange(most, dtype=jnp.int32)
    real = index < upto[-1]
    known = jnp.minimum(index, jnp.maximum(upto[-1] - 1, 0))
    row = jnp.searchsorted(upto, known, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, num_rows - 1)
    piece = jnp.minimum(index, upto[-1] - 1) - (upto - pieces)[row]
    block = jnp.clip(top[row] + piece, 0, num_blocks - 1)
    begin = rows.starts[row] - block * query_block
    low, high = jnp.maximum(begin, 0), jnp.minimum(begin + rows.counts[row], query_block)
    offset = (rows.lengths - rows.counts)[row] - begin
    first = jnp.zeros_like(row) if window is None else jnp.maximum(offset + low - window + 1, 0) // key_block
    stop = (offset + high - 1) // key_block + 1
    nothing = jnp.zeros_like(row)
    return Work(
        row=row,
        block=block,
        offset=offset,
        low=jnp.where(real, low, nothing),
        high=jnp.where(real, high, nothing),
        first=jnp.where(real, first, nothing),
        stop=jnp.where(real, stop, nothing),
        num_items=upto[-1],
    )
