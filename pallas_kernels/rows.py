"""Ragged rows: which queries of a flat batch belong to which sequence, and where that sequence stands.

    q [T, H, D]:   | row 0: 1 query | row 1: 5 queries ... | gap | row 2 | (row 3 is empty) | row 4 ... |

A row with one query decodes, one with more is a chunk of a prompt; both may be in one call. Gaps belong to nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import jax
import jax.numpy as jnp


class Kind(Enum):
    """What the caller promises about the rows. Results are equal; what is compiled is not."""

    DECODE = "decode"  # no row has more than one query: broken, the others of such a row come out wrong
    PREFILL = "prefill"  # most rows have many; one with a single query pays for a block of them
    MIXED = "mixed"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Rows in the order of their queries, which do not overlap: starts never decrease, empty rows included."""

    starts: jax.Array  # i32[B]; index into T of the row's first query
    counts: jax.Array  # i32[B]; queries, 0 for an empty row
    lengths: jax.Array  # i32[B]; tokens in the pages, the queries' own included: the last query is at position lengths - 1

    @property
    def stops(self) -> jax.Array:
        """i32[B]; index into T behind the row's last query."""
        return self.starts + self.counts


def rows_of_tokens(positions: jax.Array, valid: jax.Array) -> Rows:
    """Every query at positions i32[T] is a row of its own, empty where not valid bool[T]."""
    return Rows(
        starts=jnp.arange(positions.shape[0], dtype=jnp.int32),
        counts=valid.astype(jnp.int32),
        lengths=positions + 1,
    )


def rows_of_tiles(positions: jax.Array, valid: jax.Array, owners: jax.Array) -> Rows:
    """N rows of N tiles of t queries, at positions i32[T] where valid bool[T], of the sequences owners i32[N].

    Within a tile positions follow each other and what is not valid comes last. Tiles that go on where the tile before, of
    the same owner, ended with its last query become part of its row, which stands where its first tile does; theirs are empty.
    """
    num_tiles = owners.shape[0]
    tile = positions.shape[0] // num_tiles
    first = positions.reshape(num_tiles, tile)[:, 0]
    filled = valid.reshape(num_tiles, tile).sum(axis=1, dtype=jnp.int32)
    before = jnp.roll(jnp.arange(num_tiles), 1)
    follows = (owners == owners[before]) & (first == first[before] + tile) & (filled[before] == tile) & (filled > 0)
    follows &= jnp.arange(num_tiles) > 0
    row = jnp.cumsum(~follows) - 1  # number of the row that a tile belongs to, without empty rows
    of_row = jax.ops.segment_sum(filled, row, num_segments=num_tiles, indices_are_sorted=True)
    counts = jnp.where(follows, 0, of_row[row])
    return Rows(starts=jnp.arange(num_tiles, dtype=jnp.int32) * tile, counts=counts, lengths=first + counts)
