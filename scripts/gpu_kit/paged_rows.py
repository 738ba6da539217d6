"""Sequences of random KV on shuffled pages of a pool that is NaN elsewhere, and dense attention over them in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.rows import Rows

NUM_LAYERS, LAYER = 2, 1


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Of a pool and the queries over it; everything is as small as it can be."""

    kv_heads: int = 2
    group: int = 3
    dim: int = 8
    page_size: int = 4
    num_pages: int = 32

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group


class PagedRows:
    """Rows of queries [(queries, tokens)] in order, `gap` queries that are nobody's before each, over their own pages."""

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        shapes: Shapes,
        dtype: Any,
        *,
        heads_major: bool = True,
        gap: int = 0,
        query_dtype: Any = None,
        seed: int = 0,
    ) -> None:
        """`query_dtype`: by default that of the pool, or float32 over int8."""
        rng = np.random.default_rng(seed)
        s = shapes
        self.shapes, self.heads_major = shapes, heads_major
        self.quantised = np.dtype(dtype) == np.int8
        counts = np.array([queries for queries, _ in rows], np.int32)
        starts = np.cumsum(counts + gap, dtype=np.int32) - counts
        at_host: Any = (starts, counts, np.array([tokens for _, tokens in rows], np.int32))
        self.rows = Rows(*at_host)
        query_dtype = query_dtype or (np.float32 if self.quantised else dtype)
        self.q = rng.normal(size=(int(starts[-1] + counts[-1]) + gap, s.heads, s.dim)).astype(query_dtype)
        width = max(-(-tokens // s.page_size) for _, tokens in rows)  # the longest row fills its table
        self.tables = np.zeros((len(rows), width), np.int32)
        junk = 77 if self.quantised else np.nan
        pool = np.full((NUM_LAYERS, s.num_pages, s.page_size, s.kv_heads, 2 * s.dim), junk).astype(dtype)
        scales = np.full((*pool.shape[:-1], 2), np.nan, np.float32)
        free = list(rng.permutation(np.arange(1, s.num_pages)))
        self.content = []
        for number, (_, tokens) in enumerate(rows):
            at = np.arange(tokens)
            self.tables[number, : -(-tokens // s.page_size)] = [free.pop() for _ in range(-(-tokens // s.page_size))]
            where = (LAYER, self.tables[number][at // s.page_size], at % s.page_size)
            shape = (tokens, s.kv_heads, 2 * s.dim)
            values = rng.integers(-127, 128, shape) if self.quantised else rng.normal(size=shape)
            pool[where] = values.astype(dtype)
            scales[where] = rng.uniform(0.001, 0.02, (*shape[:-1], 2))
            meant = pool[where].astype(np.float64)
            if self.quantised:
                meant = (meant.reshape(*shape[:-1], 2, s.dim) * scales[where][..., None]).reshape(shape)
            self.content.append(meant)
        ordered = [array.swapaxes(2, 3) if heads_major else array for array in (pool, scales)]
        self.kv, self.scales = jnp.asarray(ordered[0]), jnp.asarray(ordered[1]) if self.quantised else None

    def wanted(self, *, scale: float, window: int | None) -> np.ndarray:
        """Dense attention in float64, zeros where nobody's queries are."""
        s = self.shapes
        out = np.zeros(self.q.shape)
        for number, content in enumerate(self.content):
            start, count, length = (int(field[number]) for field in (self.rows.starts, self.rows.counts, self.rows.lengths))
            for index in range(count):
                position = length - count + index
                seen = content[0 if window is None else max(0, position - window + 1) : position + 1]
                query = self.q[start + index].astype(np.float64).reshape(s.kv_heads, s.group, s.dim)
                scores = np.einsum("kgd,jkd->kgj", query, seen[..., : s.dim]) * scale
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                weights /= weights.sum(axis=-1, keepdims=True)
                out[start + index] = np.einsum("kgj,jkd->kgd", weights, seen[..., s.dim :]).reshape(s.heads, s.dim)
        return out
