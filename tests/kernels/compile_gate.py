"""The real TPU compiler on every kernel, for chips that are not here: `python -m tests.kernels.compile_gate TOPOLOGY...`.

One JSON line per kernel: compile seconds, temporaries, aliased bytes and copies as large as the cache. The caches are abstract
and hold a GiB: small ones hide copies. libtpu wants its environment from the first import on (`ENVIRONMENT`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.attention import attend
from pallas_kernels.implementation import Implementation
from pallas_kernels.rows import Kind, Rows
from pallas_kernels.tpu_scales import store_scales
from pallas_kernels.transfer import gather, scatter
from pallas_kernels.write import write

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
KERNEL_CALLS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call_ffi")  # the last from jax 0.11 on
CACHE_BYTES = 2**30
NUM_LAYERS = 4
_BIG = re.compile(r"= (\w+)\[([\d,]*)\][^ ]* (copy|copy-start|transpose|convert|reshape|all-gather)\(")
_ITEM_BYTES = {"bf16": 2, "f32": 4, "s8": 1, "u8": 1, "s32": 4, "u16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kernel at one shape."""

    kernel: str
    implementation: Implementation = "tpu"
    dim: int = 128
    kv_heads: int = 8
    group: int = 4
    dtype: str = "bfloat16"
    page_size: int = 16
    window: int | None = None
    rows: int = 32
    queries: int = 32
    slabs: int | None = None
    context: int = 8192

    @property
    def num_pages(self) -> int:
        """Pages of a cache of CACHE_BYTES."""
        page_bytes = self.kv_heads * self.page_size * 2 * self.dim * jnp.dtype(self.dtype).itemsize * NUM_LAYERS
        return CACHE_BYTES // page_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the cache."""
        inner = (self.kv_heads, self.page_size) if self.heads_major else (self.page_size, self.kv_heads)
        return NUM_LAYERS, self.num_pages, *inner, 2 * self.dim

    @property
    def heads_major(self) -> bool:
        """How pages lie."""
        return self.implementation == "tpu"

    @property
    def options(self) -> dict[str, Any]:
        """What every kernel is told."""
        return {"heads_major": self.heads_major, "implementation": self.implementation}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the compiler made of a case."""

    topology: str
    case: str
    seconds: float
    cache_bytes: int
    temp_bytes: int
    alias_bytes: int
    copies: int  # instructions that make a quarter of the cache or more anew
    kernels: int  # calls of compiled kernels


def attention(case: Case, spec: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(step, arguments): the cache goes in donated and comes out as it is."""
    kind = Kind(case.kernel)
    options = {"scale": 0.1, "window": case.window, "kind": kind, **case.options}
    dtype = jnp.dtype(case.dtype)

    def step(cache: list[Any], q: Any, layer: Any, tables: Any, rows: Rows) -> Any:
        scales = cache[1] if len(cache) == 2 else None
        return cache, attend(q, cache[0], layer, tables, rows, scales=scales, **options)

    of_rows = spec((case.rows,), jnp.int32)
    q = spec((case.queries, case.kv_heads * case.group, case.dim), jnp.bfloat16 if dtype == jnp.int8 else dtype)
    tables = spec((case.rows, case.context // case.page_size), jnp.int32)
    return step, (cache_of(case, spec), q, spec((), jnp.int32), tables, Rows(of_rows, of_rows, of_rows))


def writing(case: Case, spec: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """New rows, float32 on their way; int8 ones come with scales, which have a kernel on TPU."""
    dtype = jnp.dtype(case.dtype)
    index = spec((case.queries,), jnp.int32)
    rows = [spec((case.queries, case.kv_heads, 2 * case.dim), jnp.int8 if dtype == jnp.int8 else jnp.float32)]
    if dtype == jnp.int8:
        rows.append(spec((case.queries, case.kv_heads, 2), jnp.float32))

    def step(cache: list[Any], rows: list[Any], layer: Any, pages: Any, offsets: Any) -> Any:
        options = {"heads_major": case.heads_major, "most_slabs": case.slabs}
        out = [write(cache[0], layer, rows[0], pages, offsets, implementation=case.implementation, **options)]
        if case.implementation == "tpu":
            store = partial(store_scales, most_pages=case.slabs or case.queries)
        else:
            store = partial(write, **options)
        return [*out, *(store(a, layer, b, pages, offsets) for a, b in zip(cache[1:], rows[1:], strict=True))]

    return step, (cache_of(case, spec), rows, spec((), jnp.int32), index, index)


def gathering(case: Case, spec: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A piece for the wire, in bfloat16."""

    def step(cache: list[Any], pages: Any) -> Any:
        wire = jnp.bfloat16 if case.dtype == "float32" else None
        return cache, gather(cache[0], pages, dtype=wire, **case.options)

    return step, (cache_of(case, spec)[:1], spec((case.queries // case.page_size,), jnp.int32))


def scattering(case: Case, spec: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A piece from the wire, in bfloat16."""

    def step(cache: list[Any], rows: Any, pages: Any, begin: Any, end: Any) -> Any:
        return [scatter(cache[0], rows, pages, begin, end, **case.options)]

    one = spec((), jnp.int32)
    wire = jnp.int8 if case.dtype == "int8" else jnp.bfloat16
    rows = spec((NUM_LAYERS, case.queries, case.kv_heads, 2 * case.dim), wire)
    return step, (cache_of(case, spec)[:1], rows, spec((case.queries // case.page_size,), jnp.int32), one, one)


def copying(case: Case, spec: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Decoding from a cache that lies in the other order, turned around for the kernel."""
    step, (cache, *rest) = attention(dataclasses.replace(case, kernel="decode"), spec)
    num_layers, num_pages, a, b, features = case.shape

    def turned(cache: list[Any], *rest: Any) -> Any:
        return cache, step([cache[0].swapaxes(2, 3)], *rest)[1]

    return turned, ([spec((num_layers, num_pages, b, a, features), cache[0].dtype)], *rest)


def cache_of(case: Case, spec: Callable[..., Any]) -> list[Any]:
    """[data] or [data, scales]."""
    data = spec(case.shape, jnp.dtype(case.dtype))
    return [data, spec((*case.shape[:-1], 2), jnp.float32)] if case.dtype == "int8" else [data]


KERNELS = {
    **{kind.value: attention for kind in Kind},
    "write": writing,
    "gather": gathering,
    "scatter": scattering,
    "copying": copying,
}


def compile_case(case: Case, topology: str, device: Any) -> Verdict:
    """Compile one case for one device of `topology`."""
    mesh = Mesh(np.array([device]), ("tp",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    step, arguments = KERNELS[case.kernel](case, partial(_spec, whole))
    with jax.set_mesh(mesh):
        lowered = jax.jit(step, donate_argnums=0).lower(*arguments)
    begin = time.monotonic()
    compiled = lowered.compile()
    seconds = time.monotonic() - begin
    memory, text = compiled.memory_analysis(), compiled.as_text()
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments[0]))
    return Verdict(
        topology=topology,
        case=describe(case),
        seconds=round(seconds, 2),
        cache_bytes=cache_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        copies=len(list(big_copies(text, cache_bytes // 4))),
        kernels=sum(text.count(f'custom_call_target="{target}"') for target in KERNEL_CALLS),
    )


def describe(case: Case) -> str:
    """The case in a few words."""
    heads = f"{case.kv_heads * case.group}/{case.kv_heads}"
    window = "" if case.window is None else f" window {case.window}"
    context = "" if case.context == 8192 else f" context {case.context}"
    return f"{case.kernel} D {case.dim} heads {heads} {case.dtype} S {case.page_size} T {case.queries}{window}{context}"


def big_copies(text: str, least_bytes: int) -> Iterator[str]:
    """Instructions of optimised HLO that make `least_bytes` or more anew without computing anything."""
    for match in _BIG.finditer(text):
        kind, dims, _ = match.groups()
        if int(np.prod([int(d) for d in dims.split(",") if d])) * _ITEM_BYTES.get(kind, 4) >= least_bytes:
            yield match.group(0)


def _spec(whole: NamedSharding, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)


def cases(full: bool) -> Iterator[Case]:
    """What CI compiles for every chip, or all there is."""
    for dim in (64, 128):
        yield Case(kernel="decode", dim=dim)
        yield Case(kernel="prefill", dim=dim, queries=512)
        for kernel in ("write", "gather", "scatter"):
            yield Case(kernel=kernel, dim=dim, queries=256)
    yield Case(kernel="decode", dtype="int8", page_size=128, rows=256, queries=256)
    yield Case(kernel="write", dtype="int8", page_size=128)
    if full:
        for dim in (64, 128):
            yield from _rest(dim)


def _rest(dim: int) -> Iterator[Case]:
    """Of one head dimension, what CI does not compile."""
    attention_shapes = (
        {"kv_heads": 1, "group": 8},  # one local head
        {"kv_heads": 1, "group": 8, "page_size": 64},
        {"kv_heads": 16, "group": 1},
        {"kv_heads": 4, "group": 7},  # not a power of two
        {"window": 1024},
        {"dtype": "float32"},
        {"dtype": "int8", "page_size": 128},
        {"dtype": "int8", "page_size": 128, "kv_heads": 1, "group": 8},
    )
    for shape in attention_shapes:
        yield Case(kernel="decode", dim=dim, **shape)
        yield Case(kernel="prefill", dim=dim, queries=512, **shape)
    yield Case(kernel="decode", dim=dim, rows=256, queries=256, context=2**17)
    yield Case(kernel="prefill", dim=dim, queries=2048, rows=64)
    yield Case(kernel="mixed", dim=dim, queries=512)
    yield Case(kernel="write", dim=dim, queries=2048, slabs=256)
    for shape in ({"dtype": "float32"}, {"kv_heads": 1}, {"dtype": "int8", "page_size": 128}):
        yield Case(kernel="write", dim=dim, queries=512, slabs=65, **shape)  # what tiles of 16 tokens promise
        for kernel in ("gather", "scatter"):
            yield Case(kernel=kernel, dim=dim, queries=512, **shape)


def bad_cases() -> Iterator[Case]:
    """What must not pass: a cache that is turned around for the kernel."""
    yield Case(kernel="copying")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("topologies", nargs="*", default=TOPOLOGIES)
    parser.add_argument("--only", default="")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--bad", action="store_true", help="compile what must not pass")
    options = parser.parse_args()
    for name in options.topologies:
        device = topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]
        for case in bad_cases() if options.bad else cases(options.full):
            if options.only in describe(case):
                print(json.dumps(asdict(compile_case(case, name, device))), flush=True)
