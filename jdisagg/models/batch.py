"""The one form in which tokens reach a model: flat tokens in tiles, each tile of one sequence.

T = N * t tokens, N tiles of t tokens. Decode and `exact` steps use t = 1 (every token its own tile); prefill uses larger
tiles so that a tile's queries share one gather of its sequence's pages. Padding tokens have position 0, write to the null
page (0), and their output is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax

from jdisagg.kv.group import KVGroup
from pallas_kernels.rows import Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenBatch:
    """Device inputs of one forward pass."""

    token_ids: jax.Array  # i32[T]
    positions: jax.Array  # i32[T]
    write_pages: jax.Array  # i32[T]; page that receives the token's KV
    write_offsets: jax.Array  # i32[T]; slot inside the page
    page_tables: jax.Array  # i32[N, M]; pages of each tile's sequence, 0-padded
    rows: Rows  # N; the same queries without padding: tiles that go on with a sequence are one row, with the first one's table


class AttentionOps(Protocol):
    """Kernels a model calls, bound to one implementation (ref | tpu | gpu) and KV layout."""

    def write(self, kv: KVGroup, layer: int | jax.Array, k: jax.Array, v: jax.Array, batch: TokenBatch) -> KVGroup:
        """Store k, v [T, K, D] of one layer into their pages; `kv` holds the group's whole arrays, donated through."""
        ...

    def attend(
        self, q: jax.Array, kv: KVGroup, layer: int | jax.Array, batch: TokenBatch, *, scale: float, window: int | None
    ) -> jax.Array:
        """Causal attention of q [T, H, D] over the pages of each tile; query i sees key j when j <= i (and i - j < window)."""
        ...
