"""Ends of a transfer for the reshaping sweep: one mesh, one number of kv heads, a pool for every page size and dtype.

The pools of one end are groups of one KVPool, gathered and scattered by one executable: compiling them one by one would take
minutes. What a pool holds is written and read as NumPy arrays, element by element, without the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import jax
import numpy as np

from jdisagg.engine.token_index import token_index
from jdisagg.kv.group import KVGroup
from jdisagg.kv.layout import KVLayout, choose_layout
from jdisagg.kv.pool import KVPool
from jdisagg.kv.spec import KVSpec
from jdisagg.models.sharding import make_mesh
from jdisagg.transfer.base import Piece
from jdisagg.transfer.convert import NP_DTYPES
from jdisagg.transfer.target import PieceTarget

DTYPES = tuple(NP_DTYPES)
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
TPS = HEADS = (1, 2, 4, 8)
LAYERS, FEATURES, TOKENS, CHUNK = 2, 4, 40, 16


@dataclass(frozen=True)
class Pool:
    """One page size and dtype of an end; `pages` are the sequence's, in no order."""

    layout: KVLayout
    pages: tuple[int, ...]

    def canvas(self, num_pages: int, seed: int) -> KVGroup:
        """Random bytes everywhere."""
        rng = np.random.default_rng(seed)
        return jax.tree.map(lambda x: _random(rng, x.shape, np.dtype(x.dtype)), self.layout.abstract(num_pages))

    def paint(self, canvas: KVGroup, rows: KVGroup, begin: int) -> None:
        """Put rows [L, T, K, ..] of tokens from `begin` on into the canvas, every replica of a head."""
        for array, new in zip(canvas.arrays, rows.arrays, strict=True):
            new = np.repeat(new, self.layout.num_replicas, axis=2)
            for number in range(new.shape[1]):
                page, offset = divmod(begin + number, self.layout.page_size)
                cell = new[:, number].view(array.dtype)
                if self.layout.heads_major:
                    array[:, self.pages[page], :, offset] = cell
                else:
                    array[:, self.pages[page], offset] = cell

    def where(self, begin: int, end: int) -> np.ndarray:
        """Index arrays of one piece."""
        return token_index(self.pages, begin, end, page_size=self.layout.page_size, width=CHUNK)


class End:
    """P or D: `pools` by (page size, dtype)."""

    def __init__(self, tp: int, heads: int) -> None:
        self.mesh = make_mesh(jax.devices("cpu"), tp)
        rng = np.random.default_rng(tp * 10 + heads)
        self.pools: dict[tuple[int, str], Pool] = {}
        for page_size, dtype in product(PAGE_SIZES, DTYPES):
            spec = KVSpec(num_layers=LAYERS, num_kv_heads=heads, features=FEATURES, dtype=dtype)
            pages = tuple((1 + rng.permutation(-(-TOKENS // page_size))).tolist())
            self.pools[page_size, dtype] = Pool(choose_layout(spec, self.mesh, page_size), pages)
        layouts = tuple(pool.layout for pool in self.pools.values())
        self.piece_sharding = layouts[0].piece_sharding(self.mesh)
        self.num_pages = -(-TOKENS // min(PAGE_SIZES)) + 2
        self._pool = KVPool(layouts, self.mesh, self.num_pages)

        def gather(groups, wheres):
            each = zip(layouts, groups, wheres, strict=True)
            return tuple(layout.gather_tokens(self.mesh, kv, at[0], at[1]) for layout, kv, at in each)

        def scatter(groups, pieces, wheres):
            each = zip(layouts, groups, pieces, wheres, strict=True)
            return tuple(layout.scatter_tokens(self.mesh, kv, rows, at[0], at[1]) for layout, kv, rows, at in each)

        self._gather = jax.jit(gather, out_shardings=self.piece_sharding)
        self._scatter = jax.jit(scatter, donate_argnums=0, out_shardings=self._pool.shardings)

    def fill(self, canvases: list[KVGroup]) -> None:
        """Make the pools hold what the canvases show."""
        self._pool.take()
        placed = [jax.device_put(group, to) for group, to in zip(canvases, self._pool.shardings, strict=True)]
        self._pool.put(tuple(placed))

    def read(self) -> list[KVGroup]:
        """What the pools hold."""
        groups = self._pool.take()
        self._pool.put(groups)
        return jax.device_get(list(groups))

    def export(self, begin: int, end: int) -> list[Piece]:
        """Tokens [begin, end) of every pool."""
        groups = self._pool.take()
        rows = self._gather(groups, tuple(pool.where(begin, end) for pool in self.pools.values()))
        self._pool.put(groups)
        return [Piece(begin=begin, end=end, data=one.data, scales=one.scales) for one in rows]

    def take_in(self, pieces: list[Piece]) -> None:
        """One piece for every pool."""
        wheres = tuple(pool.where(piece.begin, piece.end) for pool, piece in zip(self.pools.values(), pieces, strict=True))
        rows = tuple(KVGroup(piece.data, piece.scales) for piece in pieces)
        self._pool.put(self._scatter(self._pool.take(), rows, wheres))

    def target(self, dtype: str) -> PieceTarget:
        """The form of pieces for pools of `dtype`."""
        return PieceTarget.of(self.pools[PAGE_SIZES[0], dtype].layout.spec, self.piece_sharding, CHUNK)


def random_rows(seed: int, heads: int, dtype: str) -> KVGroup:
    """KV of the sequence's tokens [L, TOKENS, K, F]: floats of many magnitudes, beyond float16 too, or integers and scales."""
    rng = np.random.default_rng(seed)
    shape = (LAYERS, TOKENS, heads, FEATURES)
    if dtype == "int8":
        scales = 2.0 ** rng.uniform(-12, 12, (*shape[:-1], 2))
        return KVGroup(rng.integers(-127, 128, shape, np.int8), scales.astype(np.float32))
    values = rng.normal(size=shape) * 10.0 ** rng.uniform(-4, 4.5 if dtype == "float16" else 7, shape)
    with np.errstate(over="ignore"):
        return KVGroup(np.nan_to_num(values.astype(NP_DTYPES[dtype]), posinf=60000, neginf=-60000))


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()
