"""The static shape of one compiled attention kernel, and what it needs of a chip."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp


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
        """(head, query, query head of the group) rows of a part."""
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
    def value_dim(self) -> int:
        """Features of a part's sums."""
        return self.features if self.dim == self.features else self.features - self.dim
