"""Block tables that give tiny rows many blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pallas_kernels.blocks import Blocks
from pallas_kernels.gpu_blocks import GpuBlocks


@dataclass(frozen=True)
class FixedBlocks:
    """A block table for tests: small blocks, so that tiny rows have many."""

    queries: int
    pages: int

    def blocks(self, *, decode: bool, **_: Any) -> Blocks:
        """See BlockTable."""
        return Blocks(1 if decode else self.queries, self.pages)


@dataclass(frozen=True)
class FixedGpuBlocks:
    """A rule for tests: the smallest blocks there may be, so that tiny rows have many."""

    splits: int = 1
    rows: int = 16
    keys: int = 16

    def __call__(self, **_: Any) -> GpuBlocks:
        """See `gpu_blocks_by_rule`."""
        return GpuBlocks(rows=self.rows, keys=self.keys, splits=self.splits, warps=4, stages=1)
