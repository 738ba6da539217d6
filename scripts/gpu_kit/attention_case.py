"""Ragged attention cases, their arrays with every unused cell NaN, and the right answer in NumPy float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np

PAGE_SIZE = 16
LAYERS, LAYER = 2, 1
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8}
TOLERANCE = {"float32": 2e-4, "bfloat16": 4e-2, "int8": 4e-2}  # of values about 1; probabilities are rounded, too
INT8_SCALE = 1 / 40.0


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


@dataclass(frozen=True)
class Arrays:
    """What a kernel gets. Pages are tokens-major here: [L, P, S, K, F]."""

    case: Case
    seed: int = 0

    @cached_property
    def page_tables(self) -> np.ndarray:
        """i32[B, M], shuffled; page 0 belongs to nobody."""
        width = max(-(-length // PAGE_SIZE) for _, length in self.case.rows)
        pages = 1 + np.random.default_rng(self.seed).permutation(len(self.case.rows) * width)
        return pages.reshape(len(self.case.rows), width).astype(np.int32)

    @cached_property
    def q(self) -> np.ndarray:
        """f32[T, H, D], rounded as the cache is."""
        case = self.case
        shape = (sum(count for count, _ in case.rows), case.num_heads, case.head_dim)
        values = np.random.default_rng(self.seed + 1).normal(size=shape).astype(np.float32)
        return values if case.kv_dtype == "float32" else values.astype(ml_dtypes.bfloat16).astype(np.float32)

    @cached_property
    def cells(self) -> np.ndarray:
        """bool[P, S]: cells that some sequence holds."""
        held = np.zeros((self.page_tables.max() + 1, PAGE_SIZE), bool)
        for row, (_, length) in enumerate(self.case.rows):
            for token in range(length):
                held[self.page_tables[row, token // PAGE_SIZE], token % PAGE_SIZE] = True
        return held

    @cached_property
    def stored(self) -> np.ndarray:
        """The cache, [L, P, S, K, F]; NaN (integers: the largest) where nobody looks."""
        case, rng = self.case, np.random.default_rng(self.seed + 2)
        shape = (LAYERS, *self.cells.shape, case.num_kv_heads, 2 * case.head_dim)
        if case.kv_dtype == "int8":
            values = rng.integers(-100, 100, shape).astype(np.int8)
            return np.where(self.cells[None, :, :, None, None], values, np.int8(127))
        values = rng.normal(size=shape).astype(np.float32)
        return np.where(self.cells[None, :, :, None, None], values, np.float32(np.nan)).astype(DTYPES[case.kv_dtype])

    @cached_property
    def scales(self) -> np.ndarray | None:
        """f32[L, P, S, K, 2] of an int8 cache; NaN where nobody looks."""
        if self.case.kv_dtype != "int8":
            return None
        shape = (*self.stored.shape[:-1], 2)
        values = INT8_SCALE * np.random.default_rng(self.seed + 3).uniform(0.5, 1.5, shape)
        return np.where(self.cells[None, :, :, None, None], values, np.nan).astype(np.float32)

    @cached_property
    def starts(self) -> np.ndarray:
        """i32[B]; index of each sequence's first query."""
        counts = [count for count, _ in self.case.rows]
        return np.cumsum([0, *counts[:-1]]).astype(np.int32)

    @cached_property
    def positions(self) -> np.ndarray:
        """i32[T]."""
        return np.concatenate([np.arange(length - count, length) for count, length in self.case.rows]).astype(np.int32)

    @cached_property
    def owners(self) -> np.ndarray:
        """i32[T]; the sequence of each query."""
        return np.repeat(np.arange(len(self.case.rows)), [count for count, _ in self.case.rows]).astype(np.int32)

    def answer(self) -> np.ndarray:
        """f64[T, H, D]."""
        case, out = self.case, np.zeros(self.q.shape, np.float64)
        dim, group = case.head_dim, case.num_heads // case.num_kv_heads
        kv = self.stored[LAYER].astype(np.float64)
        if self.scales is not None:
            kv = kv * np.repeat(self.scales[LAYER].astype(np.float64), dim, axis=-1)
        for index, (row, at) in enumerate(zip(self.owners, self.positions, strict=True)):
            first = 0 if case.window is None else max(0, at - case.window + 1)
            tokens = np.arange(first, at + 1)
            seen = kv[self.page_tables[row, tokens // PAGE_SIZE], tokens % PAGE_SIZE]  # [J, K, F]
            for head in range(case.num_heads):
                scores = seen[:, head // group, :dim] @ self.q[index, head].astype(np.float64) * dim**-0.5
                weights = np.exp(scores - scores.max())
                out[index, head] = weights @ seen[:, head // group, dim:] / weights.sum()
        return out
