"""Ragged attention cases, and what each of them may be off."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from gpu_kit.paged_rows import PagedRows, Shapes

PAGE_SIZE = 16
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8}
TOLERANCE = {"float32": 2e-4, "bfloat16": 4e-2, "int8": 4e-2}  # of values about 1; probabilities are rounded, too


@dataclass(frozen=True, kw_only=True)
class Case:
    """`rows`: (queries, tokens in the pages) of each sequence; the queries are its last ones."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 128
    kv_dtype: str = "float32"
    window: int | None = None

    def arrays(self, *, heads_major: bool) -> PagedRows:
        """What a kernel gets; queries over anything but float32 are bfloat16."""
        num_pages = 1 + len(self.rows) * max(-(-tokens // PAGE_SIZE) for _, tokens in self.rows)
        group = self.num_heads // self.num_kv_heads
        shapes = Shapes(kv_heads=self.num_kv_heads, group=group, dim=self.head_dim, page_size=PAGE_SIZE, num_pages=num_pages)
        query_dtype = np.float32 if self.kv_dtype == "float32" else ml_dtypes.bfloat16
        return PagedRows(self.rows, shapes, DTYPES[self.kv_dtype], heads_major=heads_major, query_dtype=query_dtype)


EDGES = ((1, 1), (1, PAGE_SIZE), (1, PAGE_SIZE + 1), (1, 5 * PAGE_SIZE), (1, 8 * PAGE_SIZE - 1))
CHUNKS = ((7, 7), (PAGE_SIZE, 4 * PAGE_SIZE), (33, 40))
CASES = (
    Case(name="decode, page edges", rows=EDGES),
    Case(name="decode bfloat16", rows=EDGES, kv_dtype="bfloat16"),
    Case(name="decode bfloat16, D 64", rows=EDGES, kv_dtype="bfloat16", head_dim=64),
    Case(name="decode int8", rows=EDGES, kv_dtype="int8"),
    Case(name="decode MQA", rows=EDGES, num_kv_heads=1, kv_dtype="bfloat16"),
    Case(name="chunks of prompts", rows=CHUNKS, kv_dtype="bfloat16"),
    Case(name="mixed", rows=(*EDGES[:3], *CHUNKS)),
    Case(name="mixed, window 24, D 64", rows=(*EDGES, *CHUNKS), head_dim=64, window=24),
)
