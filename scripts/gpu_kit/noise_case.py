"""The noise that sampling draws, in NumPy: Threefry-2x32 of Salmon et al. (SC 2011), folded as jax.random folds it."""

from __future__ import annotations

import numpy as np

DRAWS = ((7, 0, 3), (0, 1, 131071), (2**32 - 1, 5, 40000))  # seed, choice, position
VOCAB_SIZE = 128256
ALLOWED = 4e-6  # float32 of numbers up to 17; a logarithm that is inexact near 1 is off by far more
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def answer(seed: int, choice: int, position: int, num: int) -> np.ndarray:
    """f64[num]: the first `num` Gumbel numbers of one draw."""
    key = (np.uint32(0), np.uint32(seed))
    for folded in (choice, position):
        left, right = _threefry(key, np.zeros(1, np.uint32), np.array([folded], np.uint32))
        key = (left[0], right[0])
    left, right = _threefry(key, np.zeros(num, np.uint32), np.arange(num, dtype=np.uint32))
    uniform = (((left ^ right) >> 9).astype(np.float64) + 0.5) * 2.0**-23
    return -np.log(-np.log(uniform))


def _threefry(key: tuple[np.uint32, np.uint32], left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """20 rounds over u32 counters."""
    keys = (*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    left, right = left + keys[0], right + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            left = left + right
            right = ((right << rotation) | (right >> (32 - rotation))) ^ left
        left = left + keys[(group + 1) % 3]
        right = right + keys[(group + 2) % 3] + np.uint32(group + 1)
    return left, right
