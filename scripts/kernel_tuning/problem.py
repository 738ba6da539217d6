"""What is tuned: one shape of attention, the block sizes worth trying, and how long a call with some of them takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import attend
from pallas_kernels.blocks import Blocks, BlockTable
from pallas_kernels.implementation import Refused
from pallas_kernels.rows import Kind, Rows

_CALLS = 8  # of one layer each, in one dispatch
_KEYS = (128, 256, 512, 1024, 2048)
_QUERIES = (16, 32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Attention of `rows` rows with `queries` queries each over `context` tokens of KV."""

    decode: bool
    kv_heads: int
    query_heads: int
    dim: int
    dtype: str
    page_size: int
    rows: int
    queries: int
    context: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What block sizes depend on."""
        return self.decode, self.dim, self.kv_heads, self.query_heads, self.dtype, self.page_size

    @property
    def pages_per_row(self) -> int:
        """Entries of a page table."""
        return -(-self.context // self.page_size)

    @property
    def kv_bytes(self) -> int:
        """What one call must read at least."""
        return self.rows * self.context * self.kv_heads * 2 * self.dim * jnp.dtype(self.dtype).itemsize

    def candidates(self) -> Iterator[Blocks]:
        """Block sizes worth trying."""
        pages = sorted({max(1, min(keys // self.page_size, self.pages_per_row)) for keys in _KEYS})
        queries = (1,) if self.decode else tuple(count for count in _QUERIES if count <= self.rows * self.queries)
        return (Blocks(count, number) for count in queries for number in pages)


def measure(problem: Problem, blocks: Blocks, *, runs: int, interpret: Any = False) -> float | None:
    """Median seconds of one call on the default device; None when the kernel or its compiler refuses."""
    arguments = _arguments(problem)
    step = jax.jit(partial(_calls, problem=problem, blocks=blocks, interpret=interpret))
    try:
        jax.block_until_ready(step(*arguments))
    except (jax.errors.JaxRuntimeError, Refused) as error:
        print(f"    {blocks}: refused: {str(error).splitlines()[0][:120]}")
        return None
    took = []
    for _ in range(runs):
        began_s = time.perf_counter()
        jax.block_until_ready(step(*arguments))
        took.append(time.perf_counter() - began_s)
    return statistics.median(took) / _CALLS


def _calls(
    cache: tuple[jax.Array, ...], q: jax.Array, *where: Any, problem: Problem, blocks: Blocks, interpret: Any
) -> jax.Array:
    """Calls that need each other's results, so that none is left out or moved."""
    kind = Kind.DECODE if problem.decode else Kind.PREFILL
    scales = cache[1] if len(cache) == 2 else None
    options = {"scale": problem.dim**-0.5, "window": None, "heads_major": True, "kind": kind, "scales": scales}
    table = BlockTable({problem.key: blocks})
    for _ in range(_CALLS):
        q = q + attend(q, cache[0], 0, *where, **options, implementation="tpu", table=table, interpret=interpret)
    return q


def _arguments(problem: Problem) -> tuple[Any, ...]:
    num_pages = problem.rows * problem.pages_per_row + 1
    shape = (1, num_pages, problem.kv_heads, problem.page_size, 2 * problem.dim)
    dtype = jnp.dtype(problem.dtype)
    cache = [jnp.ones(shape, dtype)]
    if dtype == jnp.int8:
        cache.append(jnp.full((*shape[:-1], 2), 0.01, jnp.float32))
    tables = np.random.default_rng(0).permutation(np.arange(1, num_pages)).reshape(problem.rows, -1).astype(np.int32)
    queries = problem.rows * problem.queries
    q = jnp.ones((queries, problem.query_heads, problem.dim), jnp.bfloat16 if dtype == jnp.int8 else dtype)
    starts = jnp.arange(problem.rows, dtype=jnp.int32) * problem.queries
    rows = Rows(starts, jnp.full_like(starts, problem.queries), jnp.full_like(starts, problem.context))
    return tuple(cache), q, tables, rows
