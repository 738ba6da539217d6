"""What a compiled step does besides computing: collectives, and copies of whole weights or of the cache."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from jdisagg.aot.hlo import Module, Placed, Result, Shape

_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_MOVES = frozenset(
    ("copy", "copy-start", "transpose", "slice", "dynamic-slice", "concatenate", "convert", "broadcast", "reverse")
)
_KERNEL_TARGETS = ("tpu_custom_call", "mosaic_gpu", "triton_kernel_call", "__gpu$xla.gpu.triton")
_OUT_OF_GRAPH = ("while", "sort")
_SORT_TARGETS = ("__cub$DeviceRadixSort", "__gpu$TopK")
_PARAMS = "params["  # the steps' first argument
_NUMBER = re.compile(r"(\.\d+|\.clone)+$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One kind of collective in one step."""

    kind: str
    count: int
    largest_bytes: int  # of one result on one device
    total_bytes: int  # of all results on one device
    optional: bool  # inside a conditional: only some steps need it


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A whole weight or the cache, written a second time in device memory."""

    of: str  # "cache" | "weight"
    instruction: str
    shape: str
    num_bytes: int
    optional: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What one step's program does besides computing."""

    collectives: tuple[Collective, ...] = ()
    copies: tuple[Copy, ...] = ()
    kernels: dict[str, int] = field(default_factory=dict)  # Pallas kernels by name: calls in a step
    led_by_host: tuple[str, ...] = ()  # on a GPU: see `led_by_host` and `jdisagg.aot.thunks`

    @property
    def required_copies(self) -> tuple[Copy, ...]:
        """Those that every step makes."""
        return tuple(copy for copy in self.copies if not copy.optional)

    def at_depth(self, shallower: Program, line: Callable[[float, float], float]) -> Program:
        """The program of a deeper model. `line`: from the counts of two depths, the shallower one's first, to its own."""

        def deeper(after: Collective) -> Collective:
            kind = (after.kind, after.optional)
            before = next((each for each in shallower.collectives if (each.kind, each.optional) == kind), None)
            count, total = (before.count, before.total_bytes) if before is not None else (0, 0)
            return replace(after, count=round(line(count, after.count)), total_bytes=round(line(total, after.total_bytes)))

        return replace(
            self,
            collectives=tuple(map(deeper, self.collectives)),
            kernels={name: round(line(shallower.kernels.get(name, 0), count)) for name, count in self.kernels.items()},
        )


def collectives(module: Module, *, trips: int) -> tuple[Collective, ...]:
    """By kind; those inside a loop count `trips` times (the layers, when they are scanned), optional ones once."""
    found: dict[tuple[str, bool], list[tuple[int, int]]] = {}
    for placed in module.walk():
        kind = placed.instruction.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            num_bytes = max((shape.num_bytes for shape in placed.instruction.shapes), default=0)
            times = trips if placed.num_loops and not placed.optional else 1
            found.setdefault((kind, placed.optional), []).append((times, num_bytes))
    return tuple(
        Collective(
            kind=kind,
            count=sum(times for times, _ in each),
            largest_bytes=max(size for _, size in each),
            total_bytes=sum(times * size for times, size in each),
            optional=optional,
        )
        for (kind, optional), each in sorted(found.items())
    )


def kernels(module: Module, *, trips: int) -> dict[str, int]:
    """Names of the Pallas kernels that a step calls, and how often."""
    found: dict[str, int] = {}
    for placed in module.walk():
        if placed.instruction.target.startswith(_KERNEL_TARGETS):
            name = _NUMBER.sub("", placed.instruction.name)
            found[name] = found.get(name, 0) + (trips if placed.num_loops else 1)
    return found


def led_by_host(module: Module) -> tuple[str, ...]:
    """Instructions that XLA:GPU keeps out of the CUDA graph of a step: loops and sorts. The host leads them, and with them
    every condition of the step, for whose value it waits."""
    found = dict.fromkeys(
        placed.instruction.name
        for placed in module.walk()
        if any(
            part.opcode in _OUT_OF_GRAPH or part.target.startswith(_SORT_TARGETS) for part in module.parts(placed.instruction)
        )
    )
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Precious:
    """What a step must not write a second time, as one device has it: HLO dtypes with shapes or sizes."""

    weights: frozenset[tuple[str, tuple[int, ...]]]
    cache: frozenset[tuple[str, int]]  # dtype and bytes of each array, scales among them
    num_tokens: int = 0  # of the step: what has this dimension may be an activation

    def of(self, placed: Placed, result: Result) -> str | None:
        """Which of them `result` is a copy of. A weight's axes may be in any order; half of a cache array will do."""
        is_named, shape = placed.instruction.op_name.startswith(_PARAMS), result.shape
        if self._is_weight(shape):
            return "weight" if is_named or self.num_tokens not in shape.dims else None
        if result.opcode == "concatenate" and self._is_joined(result, is_named=is_named):
            return "weight"
        largest = max((size for _, size in self.cache), default=0)
        sizes = [size for dtype, size in self.cache if dtype == shape.dtype or size == largest]
        return "cache" if any(shape.num_bytes * 2 >= size > 0 for size in sizes) else None

    def _is_weight(self, shape: Shape) -> bool:
        return any((dtype, _key(dims)) == (shape.dtype, _key(shape.dims)) for dtype, dims in self._matrices)

    def _is_joined(self, result: Result, *, is_named: bool) -> bool:
        """True of several weights in one array."""
        if is_named:
            sizes = [Shape(dtype, dims, 0).num_bytes for dtype, dims in self._matrices if dtype == result.shape.dtype]
            return result.shape.num_bytes >= min(sizes, default=math.inf)
        parts = result.sources
        return len(parts) > 1 and all(self._is_weight(part) and self.num_tokens not in part.dims for part in parts)

    @property
    def _matrices(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        return ((dtype, dims) for dtype, dims in self.weights if len(_key(dims)) >= 2)


def copies(module: Module, precious: Precious) -> tuple[Copy, ...]:
    """Copies in device memory of a weight, of several joined, or of a cache array. One brought into memory on the chip is no
    copy: a weight has to get there. What may be an activation counts when it says that it is a weight."""
    found = {}
    for placed in module.walk():
        for position, result in enumerate(module.results(placed.instruction)):
            shape, name = result.shape, placed.instruction.name
            of = precious.of(placed, result) if result.opcode in _MOVES and not shape.space else None
            if of is not None:
                found[name, position] = Copy(
                    of=of,
                    instruction=name,
                    shape=f"{shape.dtype}[{','.join(map(str, shape.dims))}]",
                    num_bytes=shape.num_bytes,
                    optional=placed.optional,
                )
    return tuple(found.values())


def _key(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in dims if size > 1))
