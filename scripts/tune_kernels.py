"""Find the fastest block sizes of the attention kernels on this machine's TPU, for one shape of model.

    PYTHONPATH=. python scripts/tune_kernels.py --query-heads 32 --kv-heads 8 --head-dim 128 [--kv-dtype int8] [--page-size 128]

Heads are those of one chip: with tensor parallelism, the model's divided by its degree. What is found is merged into
`pallas_kernels/tuned/CHIP.json`, which workers on such chips read at start; --out writes elsewhere. Exits 3 without a TPU, 1
when every candidate was refused.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_kit.roofline import seconds_each

from pallas_kernels.attention import attend
from pallas_kernels.blocks import KEY_FIELDS, TUNED, Blocks, BlockTable, file_stem
from pallas_kernels.implementation import Refused
from pallas_kernels.rows import Kind, Rows

ALL_REFUSED, NO_TPU = 1, 3
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


Measure = Callable[[Problem, Blocks], float | None]


def main(arguments: list[str] | None = None) -> int:
    """0, ALL_REFUSED or NO_TPU."""
    options = _parser().parse_args(arguments)
    device = jax.devices()[0]
    if device.platform != "tpu":
        print(
            f"tune_kernels: the default device is {device.platform}, wanted tpu: run it on the machine that will serve",
            file=sys.stderr,
        )
        return NO_TPU
    path = options.out or TUNED / f"{file_stem(device.device_kind)}.json"
    print(f"{device.device_kind}, jax {jax.__version__}, median of {options.runs} runs")
    found = [entry for problem in problems(options) if (entry := best(problem, partial(measure, runs=options.runs)))]
    if not found:
        print("tune_kernels: every candidate was refused, as said above; nothing is written", file=sys.stderr)
        return ALL_REFUSED
    merge(path, device.device_kind, found)
    print(f"written to {path}")
    return 0


def problems(options: argparse.Namespace) -> Iterator[Problem]:
    """Decoding and prefill at the shape that was asked for."""
    shape = {
        "kv_heads": options.kv_heads,
        "query_heads": options.query_heads,
        "dim": options.head_dim,
        "dtype": options.kv_dtype,
        "page_size": options.page_size,
        "context": options.context,
    }
    yield Problem(decode=True, rows=options.batch, queries=1, **shape)
    yield Problem(decode=False, rows=1, queries=min(options.prefill_tokens, options.context), **shape)


def best(problem: Problem, measured: Measure) -> dict[str, Any] | None:
    """The entry of the fastest candidate; None when every one was refused."""
    fastest: tuple[float, Blocks] | None = None
    print(f"  {problem}")
    for blocks in problem.candidates():
        seconds = measured(problem, blocks)
        if seconds is None:
            continue
        print(f"    {blocks}: {seconds * 1e6:9.1f} us, {problem.kv_bytes / seconds / 1e9:7.0f} GB/s of KV read once")
        if fastest is None or seconds < fastest[0]:
            fastest = (seconds, blocks)
    if fastest is None:
        return None
    seconds, blocks = fastest
    key = dict(zip(KEY_FIELDS, problem.key, strict=True))
    return {**key, "queries": blocks.queries, "pages": blocks.pages, "microseconds": round(seconds * 1e6, 1)}


def measure(problem: Problem, blocks: Blocks, *, runs: int, interpret: Any = False) -> float | None:
    """Median seconds of one call on the default device; None when the kernel or its compiler refuses."""
    arguments = _arguments(problem)
    step = jax.jit(partial(_calls, problem=problem, blocks=blocks, interpret=interpret))
    try:
        return statistics.median(seconds_each(lambda: step(*arguments), repeats=runs, at_once=1)) / _CALLS
    except (jax.errors.JaxRuntimeError, Refused) as error:
        print(f"    {blocks}: refused: {str(error).splitlines()[0][:120]}")
        return None


def merge(path: Path, device_kind: str, found: list[dict[str, Any]]) -> None:
    """Write entries to a data file; those of other shapes in it stay. Reads it back, so that what is wrong shows here."""
    content = json.loads(path.read_text()) if path.is_file() else {"blocks": []}
    entries = {tuple(entry[name] for name in KEY_FIELDS): entry for entry in (*content["blocks"], *found)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"device": device_kind, "jax": jax.__version__, "blocks": list(entries.values())}, indent=1) + "\n"
    )
    BlockTable.read(path)


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--query-heads", type=int, required=True, help="of one chip")
    parser.add_argument("--kv-heads", type=int, required=True, help="of one chip")
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--kv-dtype", default="bfloat16", choices=("bfloat16", "float32", "int8"))
    parser.add_argument("--page-size", type=int, default=16, help="tokens (default 16)")
    parser.add_argument("--batch", type=int, default=32, help="rows that decode (default 32)")
    parser.add_argument("--context", type=int, default=2048, help="tokens of KV of every row (default 2048)")
    parser.add_argument("--prefill-tokens", type=int, default=2048, help="of a prompt (default 2048)")
    parser.add_argument("--runs", type=int, default=7, help="of which the median counts (default 7)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="data file to merge into")
    return parser


if __name__ == "__main__":
    sys.exit(main())
