"""The KV pool: the only reference to the KV arrays of one mesh.

A step takes the arrays (`take`), donates them to a jitted function, and puts its result back (`put`). Between the two nobody
can hold a stale array: donation has invalidated it, and the pool is empty. Page 0 is the null page: padding is written there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jdisagg.core.errors import ConfigError
from jdisagg.kv.group import KVGroup
from jdisagg.kv.layout import KVLayout
from jdisagg.kv.memory import wants_memory

MIN_PAGES = 2  # the null page and one to use


class KVPool:
    """Arrays of every KV group; freed with the object."""

    def __init__(self, layouts: tuple[KVLayout, ...], mesh: Mesh, num_pages: int) -> None:
        """Allocate `num_pages` zeroed pages per group, the null page included, sharded by head over mesh axis "tp".

        Raises ConfigError for more pages than the devices hold."""
        assert num_pages >= MIN_PAGES, f"a pool of {num_pages} pages, of which page 0 is never used"
        self.num_pages = num_pages
        self.shardings = tuple(NamedSharding(mesh, layout.partition) for layout in layouts)
        shapes = tuple(layout.abstract(num_pages) for layout in layouts)

        def zeroed_pool() -> tuple[KVGroup, ...]:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        size_bytes = num_pages * sum(layout.bytes_per_page for layout in layouts)
        with wants_memory(
            f"--num-pages: {num_pages} pages of KV take {size_bytes} bytes, more than is free on {mesh.devices.size} "
            "device(s); lower --num-pages, or --kv-cache-bytes or --device-memory-utilization if that was given",
            ConfigError,
        ):
            arrays = jax.jit(zeroed_pool, out_shardings=self.shardings)()
            self._arrays: tuple[KVGroup, ...] | None = jax.block_until_ready(arrays)

    def take(self) -> tuple[KVGroup, ...]:
        """Hand out the arrays, by group; the pool is empty until `put`."""
        arrays, self._arrays = self._arrays, None
        assert arrays is not None, "the KV arrays are already taken: a step failed between take and put"
        return arrays

    def put(self, arrays: tuple[KVGroup, ...]) -> None:
        """Give the arrays back, as the step that took them returned them."""
        assert self._arrays is None, "the KV arrays were put back twice"
        self._arrays = arrays


def num_pages_for_bytes(layouts: tuple[KVLayout, ...], kv_cache_bytes: int) -> int:
    """Pages, the null page included, whose arrays of all groups fit in `kv_cache_bytes` over the whole mesh."""
    return kv_cache_bytes // sum(layout.bytes_per_page for layout in layouts)
