"""The static shape of one compiled attention kernel, and what it needs of a chip."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

LANES = 128  # of a register
_WIDEST = 4  # bytes of an element
_PRODUCTS = 4  # arrays of (query rows, key rows) that exist at a time
_LEAST_VMEM_BYTES = 16 * 2**20
_MOST_VMEM_BYTES = 64 * 2**20  # all that a core of the smallest chip has


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is fixed when the kernel is compiled."""

    num_groups: int  # parts of a page, each with its own product
    heads: int  # kv heads of a part
    group: int  # query heads per kv head
    query_block: int
    block_pages: int
    page_size: int
    features: int  # F
    dim: int  # features of a query: D, or F where halves are not cut
    window: int | None
    scale: float
    compute_dtype: jnp.dtype
    quantised: bool

    @property
    def query_rows(self) -> int:
        """(head, query head of the group, query) rows of a part: heads and queries of a block change places, no more."""
        return self.heads * self.query_block * self.group

    @property
    def key_rows(self) -> int:
        """(page, head, token) rows of a part."""
        return self.block_pages * self.heads * self.page_size

    @property
    def key_block(self) -> int:
        """Tokens."""
        return self.block_pages * self.page_size

    @property
    def vmem_limit_bytes(self) -> int:
        """What the kernel may take of a core's vector memory: twice what its buffers, sums and products need."""
        rows = self.num_groups * self.query_rows
        buffers = 2 * self.num_groups * self.key_rows * (self.features + 2 * self.quantised) * _WIDEST
        queries = 2 * rows * (self.dim + self.value_dim) * _WIDEST
        sums = rows * (2 * LANES + self.value_dim) * _WIDEST
        products = _PRODUCTS * self.query_rows * self.key_rows * _WIDEST
        return min(max(2 * (buffers + queries + sums + products), _LEAST_VMEM_BYTES), _MOST_VMEM_BYTES)

    @property
    def value_dim(self) -> int:
        """Features of a part's sums."""
        return self.features if self.dim == self.features else self.features - self.dim
