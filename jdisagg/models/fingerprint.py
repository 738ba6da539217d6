"""One short string that two workers share exactly when they compute the same function: spec, weights, dtype, numerics.

Weights are summed on their devices in integers, each element's bits mixed with its index: the sum does not depend on
sharding, file format or platform, and no weight is read twice from disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jdisagg.core.fingerprint import Parts
from jdisagg.models.declare import Declared, Path
from jdisagg.models.hashing import element_index, mix
from jdisagg.models.spec import ModelSpec

_WEIGHTS = {"embed_tokens": "weights.embed", "layers": "weights.layers"}  # by the first part of a path; the rest is the head
_SHOWN = 40  # characters of a value; a longer one ends in its hash


class WeightSums:
    """Sums of a model's parameters as they lie in memory (their dtype counts), each added while it is there on its own."""

    def __init__(self) -> None:
        self._checksum = jax.jit(_checksums, static_argnums=1)
        self._sums: dict[tuple[str, str], jax.Array] = {}  # by name and group
        self.dtypes: set[str] = set()

    def add(self, path: Path, declared: Declared, leaf: jax.Array) -> None:
        """Sum one parameter; of a single layer, not stacked."""
        name = f"{declared.name} {leaf.dtype} {leaf.shape}"
        self._sums[name, _WEIGHTS.get(str(path[0]), "weights.head")] = self._checksum(leaf, leaf.sharding)
        self.dtypes.add(str(leaf.dtype))

    def lines(self) -> Iterator[tuple[str, bytes]]:
        """Group and sum of each parameter, in one order for all checkpoints. Waits for the devices."""
        for (name, group), value in sorted(jax.device_get(self._sums).items()):
            yield group, f"{name} {np.sum(value, axis=0, dtype=np.uint32).tolist()}".encode()


def fingerprint(spec: ModelSpec, sums: WeightSums, *, numerics: str) -> tuple[str, Parts]:
    """Of a model with all its parameters in `sums`: 32 hex digits, and the parts that say which of the things they were made of
    differ when they do."""
    digest = xxhash.xxh3_128()
    digest.update(repr((spec, numerics)).encode())
    weights = {group: xxhash.xxh3_64() for group in (*_WEIGHTS.values(), "weights.head")}
    for group, line in sums.lines():
        digest.update(line)
        weights[group].update(line)
    parts = (
        *_fields("model", spec),
        ("numerics", numerics),
        ("dtype", ", ".join(sorted(sums.dtypes))),
        *((group, part.hexdigest()) for group, part in weights.items()),
    )
    return digest.hexdigest(), parts


def _fields(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if is_dataclass(value):
        for field in fields(value):
            yield from _fields(f"{name}.{field.name}", getattr(value, field.name))
        return
    text = str(value)
    yield name, text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... {xxhash.xxh3_64_hexdigest(text.encode())}"


def _checksums(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """u32[N, 2]: two hashes of (bits, index) summed, wrapping, over each of the N parts that x is cut into.

    The parts are added on the host: dozens of all-reduces in flight at once deadlock on CPU devices that share few threads.
    """
    axes = tuple(sharding.spec) + (None,) * (x.ndim - len(sharding.spec))
    cut = next((name for name in axes if name is not None), None)

    def part(block: jax.Array) -> jax.Array:
        starts = tuple(0 if name is None else lax.axis_index(name) * size for name, size in zip(axes, block.shape, strict=True))
        bits = lax.bitcast_convert_type(block, jnp.uint32 if x.dtype.itemsize == 4 else jnp.uint16).astype(jnp.uint32)
        place = mix(element_index(block.shape, starts, x.shape) + jnp.uint32(0x9E3779B9))
        hashes = (mix(bits ^ place), mix(bits + place * jnp.uint32(5) + jnp.uint32(1)))
        # One reduction of both: two of them make XLA:CPU store the hashes, twice the size of x, and take 10 times as long.
        sums = lax.reduce(hashes, (jnp.uint32(0), jnp.uint32(0)), _add, tuple(range(x.ndim)))
        return jnp.stack(sums)[None, :]

    mesh, given, returned = sharding.mesh, sharding.spec, PartitionSpec(cut)
    return jax.shard_map(part, mesh=mesh, in_specs=given, out_specs=returned, check_vma=False)(x)


def _add(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return left[0] + right[0], left[1] + right[1]
