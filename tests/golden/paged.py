"""A minimal paged runner over the real decoder, layout, pool and kernels: the side under test, without scheduler or engine."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdisagg.engine.ops import RefOps
from jdisagg.kv.layout import choose_layout
from jdisagg.kv.pool import KVPool
from jdisagg.models.batch import TokenBatch
from jdisagg.models.decoder import DecoderModel
from jdisagg.models.load import LoadedModel
from pallas_kernels.rows import Rows

PAGE_SIZE = 4
NUM_PAGES = 40


class PagedRun:
    """One sequence on shuffled pages, fed in pieces of any length."""

    def __init__(self, model: LoadedModel, mesh: Mesh) -> None:
        layout = choose_layout(model.spec.kv_spec(model.kv_dtype), mesh, PAGE_SIZE)
        decoder = DecoderModel(model.spec, RefOps(layout, mesh, block_tokens=16), model.layer_loop)
        self._params = model.params
        self._pool = KVPool((layout,), mesh, NUM_PAGES)
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self.table = np.random.default_rng(3).permutation(np.arange(1, NUM_PAGES)).astype(np.int32)
        self.num_tokens = 0

        def step(params, kv, batch):
            kv, hidden = decoder.forward(params, kv, batch)
            return kv, decoder.logits(params, hidden)

        self.step = jax.jit(step, donate_argnums=1)

    def feed(self, token_ids: list[int] | tuple[int, ...], *, size: int, tile: int) -> np.ndarray:
        """Run token_ids as one step padded to `size` tokens in tiles of `tile`; f32[len(token_ids), V]."""
        count = len(token_ids)
        at = np.arange(self.num_tokens, self.num_tokens + count)
        batch = TokenBatch(
            token_ids=_pad(token_ids, size),
            positions=_pad(at, size),
            write_pages=_pad(self.table[at // PAGE_SIZE], size),
            write_offsets=_pad(at % PAGE_SIZE, size),
            page_tables=np.tile(self.table, (size // tile, 1)),
            rows=Rows(*np.zeros((3, size // tile), np.int32)),  # all tiles are of one sequence, which RefOps may join
        )
        kv, out = self.step(self._params, self._pool.take(), jax.device_put(batch, self._everywhere))
        self._pool.put(kv)
        self.num_tokens += count
        return np.asarray(out)[:count]

    def feed_chunks(self, token_ids: list[int] | tuple[int, ...], *, chunk: int, tile: int) -> np.ndarray:
        """Run token_ids in chunks; f32[len(token_ids), V]."""
        pieces = [token_ids[i : i + chunk] for i in range(0, len(token_ids), chunk)]
        return np.concatenate([self.feed(piece, size=chunk, tile=tile) for piece in pieces])

    def greedy(self, prompt: tuple[int, ...], count: int, *, chunk: int, tile: int) -> tuple[int, ...]:
        """`count` greedy tokens after the prompt, decoded one by one."""
        tokens = [int(self.feed_chunks(prompt, chunk=chunk, tile=tile)[-1].argmax())]
        while len(tokens) < count:
            tokens.append(int(self.feed(tokens[-1:], size=1, tile=1)[-1].argmax()))
        return tuple(tokens)

    def swap_pages(self, first: int, second: int) -> None:
        """Plant a fault: exchange two entries of the page table after their pages were written."""
        self.table[[first, second]] = self.table[[second, first]]


def without_rope(model: LoadedModel) -> LoadedModel:
    """Plant a fault: no rotation."""
    return replace(model, spec=replace(model.spec, rope=replace(model.spec.rope, kind="linear", factor=1e12)))


def with_scaled_keys(model: LoadedModel) -> LoadedModel:
    """Plant a fault: keys 1 % too large."""
    layers = [jax.tree.map(lambda x: x, layer) for layer in model.params["layers"]]
    for layer in layers:
        owner = layer["self_attn"]
        key = ("k_norm", "scale") if "k_norm" in owner else ("k_proj", "kernel")
        owner[key[0]][key[1]] = owner[key[0]][key[1]] * np.float32(1.01)
    return replace(model, params={**model.params, "layers": layers})


def _pad(values: list[int] | tuple[int, ...] | np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out
