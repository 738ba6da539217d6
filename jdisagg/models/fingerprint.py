"""One short string that two workers share exactly when they compute the same function: spec, weights, dtype, numerics.

Weights are summed on their devices in integers, each element's bits mixed with its index: the sum does not depend on
sharding, file format or platform, and no weight is read twice from disk.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax import lax

from jdisagg.models.declare import declarations
from jdisagg.models.hashing import element_index, mix
from jdisagg.models.spec import ModelSpec


def fingerprint(spec: ModelSpec, params: dict[str, Any], *, numerics: str) -> str:
    """32 hex digits over unstacked parameters as they lie in memory (their dtype counts)."""
    digest = xxhash.xxh3_128()
    digest.update(repr((spec, numerics)).encode())
    checksum = jax.jit(_checksum)
    sums: dict[str, jax.Array] = {}
    for path, declared in declarations(spec).items():
        leaf: Any = params
        for part in path:
            leaf = leaf[part]
        sums[f"{declared.name} {leaf.dtype} {leaf.shape}"] = checksum(leaf)
    for name, value in sorted(jax.device_get(sums).items()):
        digest.update(f"{name} {np.asarray(value).tolist()}".encode())
    return digest.hexdigest()


def _checksum(x: jax.Array) -> jax.Array:
    """u32[2]: wrapping sums of two hashes of (bits, index)."""
    bits = lax.bitcast_convert_type(x, jnp.uint32 if x.dtype.itemsize == 4 else jnp.uint16).astype(jnp.uint32)
    place = mix(element_index(x.shape) + jnp.uint32(0x9E3779B9))
    return jnp.stack([jnp.sum(mix(bits ^ place)), jnp.sum(mix(bits + place * jnp.uint32(5) + jnp.uint32(1)))])
