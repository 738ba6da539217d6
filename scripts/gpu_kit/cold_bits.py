"""A process that computes what the exact step is made of, and prints a digest of the bits: `python -m gpu_kit.cold_bits`.

Compilers for accelerators choose kernels by trying them out. Two processes may choose differently, and then equal inputs
give unlike bits, were it not for the options of the exact step, which are used here.
"""

from __future__ import annotations

import argparse
import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from gpu_kit.ending import end_with_parent
from jdisagg.engine.compile_options import step_options

ROWS = 16  # of the exact step
FULL, SMALL = (4096, 14336), (64, 96)  # width and inner width of a layer


def main() -> int:
    """Returns 0."""
    end_with_parent()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true")
    width, inner = SMALL if parser.parse_args().small else FULL
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (ROWS, width), jnp.bfloat16)
    up = jax.random.normal(keys[1], (width, inner), jnp.bfloat16) * width**-0.5
    down = jax.random.normal(keys[2], (inner, width), jnp.bfloat16) * inner**-0.5

    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = jnp.dot(x, up, preferred_element_type=jnp.float32)
        return jnp.dot(jax.nn.silu(hidden).astype(x.dtype), down, preferred_element_type=jnp.float32)

    options = step_options("exact", jax.devices()[0].platform)
    print(
        hashlib.sha256(np.asarray(jax.jit(block, compiler_options=options)(x, up, down)).tobytes()).hexdigest()[:16], flush=True
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
