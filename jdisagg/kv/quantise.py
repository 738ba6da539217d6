"""int8 KV: symmetric, one scale per (token, head, half), where the halves of F are keys and values.

A token's integers depend on that token alone, so they are the same whatever batch, chunk or worker wrote it. Written with
array methods that NumPy and JAX share: workers quantise on their device when they write and on the host when a piece comes
in another dtype.

Error: |dequantised - original| <= scale / 2, scale = max|x| / 127 over the half (or 2**-126 / 2 where all are smaller than
127 * 2**-126), up to float32 rounding: a twenty-thousandth of it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import numpy as np

from jdisagg.kv.spec import SCALES

# Reciprocals are multiplied by: XLA turns division by a constant or a broadcast into that, and NumPy must give the same bytes.
_ZERO, _ONE, _STEP = np.float32(0), np.float32(1), np.float32(1 / 127)
_SMALLEST = 127 * 2.0**-126  # a smaller maximum would have a subnormal scale, which devices flush to zero

Array = TypeVar("Array", np.ndarray, jax.Array)


def quantise(rows: Array) -> tuple[Array, Array]:
    """float[..., F] -> int8[..., F] in [-127, 127] and float32[..., 2]. Where a half holds NaN or infinity its scale is NaN."""
    halves: Any = rows.astype(np.float32).reshape(*rows.shape[:-1], SCALES, rows.shape[-1] // SCALES)
    unusable = (halves * _ZERO).sum(axis=-1)  # NaN of NaN and infinity, else 0: XLA:CPU's max of many rows passes over NaN
    scales = abs(halves).max(axis=-1).clip(min=_SMALLEST) * _STEP + unusable
    data = (halves * (_ONE / scales)[..., None]).round().astype(np.int8)
    return data.reshape(rows.shape), scales


def dequantise(data: Array, scales: Array) -> Array:
    """int8[..., F], float32[..., 2] -> float32[..., F]."""
    halves: Any = data.astype(np.float32).reshape(*scales.shape, data.shape[-1] // SCALES)
    return (halves * scales[..., None]).reshape(data.shape)
