"""One parameter between file and devices: the part of each device lies in host memory once, filled slab by slab.

Parts are page aligned, so a CPU device takes them over as they are; an accelerator copies them, and then they are unmapped.
Beyond the weights themselves a load holds a few slabs, whatever the size of the largest tensor.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Sharding

Slab = tuple[slice, ...]  # one slice per dimension, both ends given
_Bounds = tuple[tuple[int, int], ...]


class HostParts:
    """The parts of one array that the devices of this process hold; devices that hold the same part share it."""

    def __init__(self, shape: tuple[int, ...], sharding: Sharding, dtype: str) -> None:
        self._shape, self._sharding = shape, sharding
        indices = sharding.addressable_devices_indices_map(shape).values()
        self._parts = {bounds: _mapped(bounds, dtype) for bounds in {_bounds(index, shape) for index in indices}}

    def fill(self, slab: Slab, values: np.ndarray) -> None:
        """Copy and cast `values`, which are those at `slab` of the whole array, to wherever they belong. Raises OverflowError
        for a finite one that would become infinite: one such weight makes every answer NaN, and does not say why."""
        for bounds, part in self._parts.items():
            inside = [(max(a, cut.start), min(b, cut.stop)) for (a, b), cut in zip(bounds, slab, strict=True)]
            if all(a < b for a, b in inside):
                to = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(inside, bounds, strict=True))
                of = tuple(slice(a - cut.start, b - cut.start) for (a, b), cut in zip(inside, slab, strict=True))
                _cast(values[of], part[to])

    def placed(self) -> jax.Array:
        """The array on its devices, arrived. Nothing may be filled afterwards: the memory may be the array's."""
        parts, self._parts = self._parts, {}
        array = jax.make_array_from_callback(self._shape, self._sharding, lambda i: parts[_bounds(i, self._shape)])
        return array.block_until_ready()


def slabs(shape: tuple[int, ...], extent: tuple[int, ...]) -> Iterator[Slab]:
    """Slabs of at most `extent` that cover `shape`, in row-major order."""
    for starts in itertools.product(*(range(0, size, step) for size, step in zip(shape, extent, strict=True))):
        yield tuple(slice(a, min(a + step, size)) for a, step, size in zip(starts, extent, shape, strict=True))


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Bounds:
    assert index is not None, "a device of this process holds nothing"
    return tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))


def _cast(values: np.ndarray, to: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        to[...] = values
    narrows = to.dtype == np.float16 and values.dtype != np.float16  # bfloat16 reaches as far as float32
    if narrows and (np.isinf(to) & np.isfinite(values)).any():
        raise OverflowError(f"values beyond {np.finfo(np.float16).max:g}, the largest that float16 holds")


def _mapped(bounds: _Bounds, dtype: str) -> np.ndarray:
    """Memory of its own: the heap would keep a part's pages after it is freed, and aligns to 16 bytes."""
    shape = tuple(b - a for a, b in bounds)
    pages = mmap.mmap(-1, math.prod(shape) * np.dtype(dtype).itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype).reshape(shape)
