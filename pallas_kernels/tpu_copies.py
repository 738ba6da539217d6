"""The copies of the TPU attention kernel: page tables of items into scalar memory, pages of keys and values beside the sums.

    item w       | its table is here | start: table of w + 1 -> other slot
    block j      | start: pages of j + 1 -> other buffer | wait for the pages of j | use them
    last block   | wait for the table of w + 1 | start: pages of its first block | ...

A slot or buffer is filled again only when what it held was used: the last wait for an item's pages reads its table too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.loops import arrive, loop
from pallas_kernels.work import FIRST, ROW, TURN


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """An array whose pages are copied block by block."""

    pages: Any  # [L, P, ...] in HBM
    buffers: Any  # [2, block_pages, ...] in VMEM
    semaphores: Any  # [2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """Refs of one call, and how its pages are found."""

    work: Any  # i32[8, W + 1] in SMEM
    layer: Any  # i32[1] in SMEM
    tables: Any  # i32[B, 1, M] in HBM
    slots: Any  # i32[2, 1, M] in SMEM: tables of this item and of the next
    slot_semaphores: Any  # [2]
    streams: tuple[Stream, ...]
    block_pages: int

    def start_table(self, item: jax.Array) -> None:
        """Begin to copy the page table of an item."""
        self._table(item).start()

    def start_item(self, item: jax.Array) -> None:
        """Begin to copy the first block of an item whose table was started; waits for that."""
        arrive(self._table(item).wait, lambda: self.start(item, self.work[FIRST, item]))

    def start(self, item: jax.Array, number: jax.Array) -> None:
        """Begin to copy block `number` of the item whose table is here."""
        self._each(item, number, lambda copy: copy.start())

    def wait(self, item: jax.Array, number: jax.Array) -> None:
        """Return when the block is in its buffer."""
        self._each(item, number, lambda copy: copy.wait())

    def buffer(self, item: jax.Array, number: jax.Array) -> jax.Array:
        """The buffer of a block."""
        return lax.rem(self.work[TURN, item] + number - self.work[FIRST, item], 2)

    def _table(self, item: jax.Array) -> Any:
        slot = lax.rem(item, 2)
        return pltpu.make_async_copy(self.tables.at[self.work[ROW, item]], self.slots.at[slot], self.slot_semaphores.at[slot])

    def _each(self, item: jax.Array, number: jax.Array, act: Callable[[Any], None]) -> None:
        buffer, slot = self.buffer(item, number), lax.rem(item, 2)

        def of_page(page: Any) -> None:
            where = (self.layer[0], self.slots[slot, 0, _entry(number, page, self.block_pages)])
            for stream in self.streams:
                target = stream.buffers.at[buffer, page]
                act(pltpu.make_async_copy(stream.pages.at[where], target, stream.semaphores.at[buffer]))

        loop(self.block_pages, of_page)


def _entry(number: jax.Array, page: Any, block_pages: int) -> jax.Array:
    """Index into a page table of a page of block `number`. Tests replace it to plant a fault."""
    return number * block_pages + page
