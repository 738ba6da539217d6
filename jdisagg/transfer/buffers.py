"""Host memory for arriving pieces, used again: pages that are there already cost a fifth of new ones to write.

take -> lent, as long as anything looks at it (an array that XLA:CPU took as it is, too) -> idle -> take
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from math import prod

import numpy as np

ALIGN_BYTES = 64  # XLA:CPU takes such memory as it is; a copy waits for a turn that never comes while its one core decodes
LEAST_BYTES = 2**20  # what is smaller comes from the C library, which uses its memory again itself
KEEP_BYTES = 2**27  # idle
WASTE = 2  # a block is at most so many times larger than asked for


class Buffers:
    """Blocks of memory. `take` is for any thread; a block comes back on the thread that looked at it last."""

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._idle: deque[np.ndarray] = deque()  # oldest first

    def take(self, num_bytes: int) -> memoryview:
        """Aligned memory, its content undefined, that nobody else gets while this view, a part of it or an array over it is
        there."""
        block = self._reuse(num_bytes) if num_bytes >= LEAST_BYTES else None
        if block is None:
            block = _aligned(num_bytes)
        lent = block[:]
        if num_bytes >= LEAST_BYTES:
            weakref.finalize(lent, self._give_back, block).atexit = False
        return lent.data[:num_bytes]

    @property
    def num_idle_bytes(self) -> int:
        """Of blocks that nobody looks at."""
        return sum(block.nbytes for block in list(self._idle))

    def _reuse(self, num_bytes: int) -> np.ndarray | None:
        for _ in range(len(self._idle)):
            try:
                block = self._idle.popleft()
            except IndexError:  # another thread was faster
                return None
            if num_bytes <= block.nbytes <= WASTE * num_bytes:
                return block
            self._idle.append(block)
        return None

    def _give_back(self, block: np.ndarray) -> None:
        """No lock: this may run anywhere, also within `take`."""
        self._idle.append(block)
        while self.num_idle_bytes > self._keep_bytes:
            try:
                self._idle.popleft()
            except IndexError:
                return


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An aligned array, its content undefined."""
    return _aligned(prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def aligned(array: np.ndarray) -> np.ndarray:
    """`array` itself, or a copy where it is not contiguous or not aligned."""
    if array.flags.c_contiguous and array.ctypes.data % ALIGN_BYTES == 0:
        return array
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def _aligned(num_bytes: int) -> np.ndarray:
    room = np.empty(num_bytes + ALIGN_BYTES, np.uint8)
    begin = -room.ctypes.data % ALIGN_BYTES
    return room[begin : begin + num_bytes]
