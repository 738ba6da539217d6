"""Arrays of a device as NumPy arrays."""

from __future__ import annotations

import jax
import numpy as np

from jdisagg.core.platforms import GPU_PLATFORMS

PINNED = "pinned_host"


def on_host(array: jax.Array) -> np.ndarray:
    """The array in host memory, not to be written to; on a CPU its own memory. Waits for the device.

    From a GPU it comes through memory that the device may write by itself: 22 GB/s on an H200, 3 into any other memory, where
    the driver copies every part once more. What all devices of a mesh hold comes from one of them.
    """
    if next(iter(array.sharding.device_set)).platform in GPU_PLATFORMS:
        one = array.addressable_data(0) if array.is_fully_replicated else array
        array = jax.block_until_ready(jax.device_put(one, one.sharding.with_memory_kind(PINNED)))
    return np.asarray(array)
