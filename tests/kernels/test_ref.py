"""The plain XLA kernels against NumPy in float64, with every page that nobody owns full of NaN."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gpu_kit.paged_rows import LAYER, PagedRows, Shapes

from pallas_kernels import ref
from pallas_kernels.rows import Rows

L, P, K, S, D, H = 2, 24, 2, 4, 8, 6  # K, S, D, H are those of `Shapes()`


def stored(array):
    """16-bit floats as their bits, as the pool keeps them on CPU."""
    return array.view(np.uint16) if array.dtype.itemsize == 2 else array


def tiled(paged, tile):
    """Queries with each row's in a tile of its own, their positions, and which of them are any: the others are at 0."""
    starts, counts, lengths = (field[:, None] for field in (paged.rows.starts, paged.rows.counts, paged.rows.lengths))
    lanes = np.arange(tile, dtype=np.int32)
    real = lanes < counts
    q = paged.q[np.where(real, starts + lanes, 0)].reshape(-1, H, D)
    return q, np.where(real, lengths - counts + lanes, 0).reshape(-1), real.reshape(-1)


@pytest.mark.kernels
@pytest.mark.parametrize("heads_major", [True, False])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("tile", "dtype"), [(1, np.float32), (4, np.float32), (4, ml_dtypes.bfloat16)])
@pytest.mark.parametrize("block_tokens", [2, 8, 128])  # of pages of 4
def test_attention_equals_dense_attention_and_ignores_nan(heads_major, window, tile, dtype, block_tokens):
    rows = [(min(tile, length), length) for length in (17, 3, 9)]
    paged = PagedRows(rows, Shapes(), dtype, heads_major=heads_major)
    q, positions, real = tiled(paged, tile)
    kernel = jax.jit(
        partial(ref.attend, scale=0.3, window=window, heads_major=heads_major, dtype=dtype, block_tokens=block_tokens)
    )
    out = np.asarray(kernel(q, stored(paged.kv), np.int32(LAYER), paged.tables, positions), np.float64)
    atol = 2e-5 if dtype == np.float32 else 3e-2
    np.testing.assert_allclose(out[real], paged.wanted(scale=0.3, window=window), atol=atol)


@pytest.mark.kernels
def test_a_block_of_many_tiles_is_shorter_so_that_it_stays_in_the_cache():
    tile_bytes = 4 * 128 * 4  # of a token: kv heads, features, float32
    blocks = [ref._cached_tokens(128, num_tiles * tile_bytes) for num_tiles in (1, 8, 9, 16, 17, 32, 500)]
    assert blocks == [128, 128, 64, 64, 32, 32, 32]
    assert ref._cached_tokens(8, 2**30) == 8


@pytest.mark.kernels
@pytest.mark.parametrize("heads_major", [True, False])
def test_attention_sums_the_same_bits_whatever_the_page_size(heads_major):
    rng = np.random.default_rng(4)
    rows, q = rng.normal(size=(64, K, 2 * D)).astype(np.float32), rng.normal(size=(1, H, D)).astype(np.float32)
    results = []
    for size in (2, 4, 8, 16, 64, 3, 6, 12, 20, 24):
        pages = rng.permutation(-(-64 // size)) + 1
        pool = np.full((1, 1 + len(pages), size, K, 2 * D), np.nan, np.float32)
        padded = np.pad(rows, ((0, -64 % size), (0, 0), (0, 0)), constant_values=np.nan)
        pool[0, pages] = padded.reshape(len(pages), size, K, 2 * D)
        pool = pool.swapaxes(2, 3) if heads_major else pool
        kernel = jax.jit(
            partial(ref.attend, scale=0.3, window=None, heads_major=heads_major, dtype=jnp.float32, block_tokens=8)
        )
        results.append(kernel(q, pool, np.int32(0), pages[None].astype(np.int32), np.array([50], np.int32)))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.kernels
@pytest.mark.parametrize("heads_major", [True, False])
def test_attention_sums_the_same_bits_whatever_the_width_of_the_page_table(heads_major):
    rng = np.random.default_rng(5)
    length, size = 50, 8
    pages = np.arange(1, 8, dtype=np.int32)
    pool = rng.normal(size=(1, 8, size, K, 2 * D)).astype(np.float32)
    pool = pool.swapaxes(2, 3) if heads_major else pool
    queries = rng.normal(size=(16, H, D)).astype(np.float32)
    kernel = jax.jit(partial(ref.attend, scale=0.3, window=None, heads_major=heads_major, dtype=jnp.float32))
    results = []
    for width in (7, 9, 16, 40):
        tables = np.tile(np.pad(pages, (0, width - len(pages))), (len(queries), 1))
        results.append(kernel(queries, pool, np.int32(0), tables, np.full(len(queries), length - 1, np.int32)))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.kernels
@pytest.mark.parametrize("heads_major", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_write_stores_the_rows_and_nothing_else(heads_major, dtype):
    rng = np.random.default_rng(2)
    before = rng.normal(size=(L, P, S, K, 2 * D)).astype(dtype)
    rows = rng.normal(size=(3, K, 2 * D)).astype(dtype)
    pages, offsets = np.array([5, 0, 7], np.int32), np.array([3, 0, 1], np.int32)
    kernel = jax.jit(partial(ref.store, heads_major=heads_major), donate_argnums=0)
    kv = kernel(jnp.asarray(stored(before.swapaxes(2, 3) if heads_major else before)), np.int32(1), rows, pages, offsets)
    wanted = before.copy()
    wanted[1, pages, offsets] = rows
    got = np.asarray(kv).view(dtype)
    np.testing.assert_array_equal(got.swapaxes(2, 3) if heads_major else got, wanted)


@pytest.mark.kernels
@pytest.mark.parametrize("heads_major", [True, False])
@pytest.mark.parametrize(("window", "tile"), [(None, 1), (5, 4)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("block_tokens", [2, 8])
def test_attention_over_int8_equals_dense_attention_over_what_it_means(heads_major, window, tile, dtype, block_tokens):
    rows = [(tile, length) for length in (17, 4, 9)]
    paged = PagedRows(rows, Shapes(), np.int8, heads_major=heads_major, query_dtype=dtype)
    q, positions, real = tiled(paged, tile)
    kernel = jax.jit(
        partial(ref.attend, scale=0.3, window=window, heads_major=heads_major, dtype=dtype, block_tokens=block_tokens)
    )
    out = np.asarray(kernel(q, paged.kv, np.int32(LAYER), paged.tables, positions, scales=paged.scales), np.float64)
    assert real.all()
    atol = 2e-5 if dtype == np.float32 else 3e-2
    np.testing.assert_allclose(out, paged.wanted(scale=0.3, window=window), atol=atol)


@pytest.mark.kernels
@pytest.mark.parametrize("heads_major", [True, False])
def test_attention_over_int8_makes_no_copy_of_the_cache(heads_major):
    """A write and an attention of one layer over 64 MiB of data, donated, with its scales: what exists of them at a time is a
    block of pages."""
    shape = (2, 1024, 4, 16) if heads_major else (2, 1024, 16, 4)
    kv = jax.ShapeDtypeStruct((*shape, 512), jnp.int8)
    scales = jax.ShapeDtypeStruct((*shape, 2), jnp.float32)
    rows, q = jax.ShapeDtypeStruct((8, 4, 512), jnp.int8), jax.ShapeDtypeStruct((8, 8, 256), jnp.float32)
    index, tables = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((8, 64), jnp.int32)
    store = partial(ref.store, heads_major=heads_major)

    def step(cache, new, q, index, tables):
        (kv, scales), (rows, new_scales) = cache, new
        kv, scales = store(kv, 1, rows, index, index), store(scales, 1, new_scales, index, index)
        options = {"scale": 0.1, "window": None, "heads_major": heads_major, "dtype": jnp.float32}
        return (kv, scales), ref.attend(q, kv, 1, tables, index, scales=scales, **options)

    new_scales = jax.ShapeDtypeStruct((8, 4, 2), jnp.float32)
    compiled = jax.jit(step, donate_argnums=0).lower((kv, scales), (rows, new_scales), q, index, tables).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 64 * 2**20
    print(f"\nheads_major={heads_major}: {memory.temp_size_in_bytes / 2**20:.1f} MiB of temporaries")
    assert memory.temp_size_in_bytes < 20 * 2**20, memory


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_row_has_the_same_bits_beside_longer_neighbours_and_in_wider_tables(dtype):
    alone = PagedRows([(1, 9)] * 3, Shapes(), dtype, seed=3)
    kv = stored(alone.kv)
    q = np.random.default_rng(4).normal(size=(3, H, D)).astype(dtype)
    kernel = jax.jit(partial(ref.attend, scale=0.3, window=None, heads_major=True, dtype=dtype, block_tokens=8))
    short = kernel(q, kv, np.int32(LAYER), alone.tables, np.array([8, 8, 8], np.int32))
    tables = np.pad(alone.tables, ((0, 0), (0, 10)))
    tables[1:] = 1 + np.arange(tables.shape[1])  # junk neighbours whose last block is far behind row 0's
    long = kernel(q, kv, np.int32(LAYER), tables, np.array([8, 45, 30], np.int32))
    np.testing.assert_array_equal(np.asarray(short[0]).view(np.uint8), np.asarray(long[0]).view(np.uint8))


@pytest.mark.kernels
@pytest.mark.parametrize("heads_major", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("counts", [(32,), (27,), (16, 13), (5, 20), (8, 8, 16)])
def test_joined_tiles_give_what_single_ones_do(heads_major, dtype, counts, monkeypatch):
    tile, num_tiles = 4, 8
    monkeypatch.setattr(ref, "WIDE_TILE", 16)
    chunks = [(count, count + 3) for count in counts]  # behind 3 tokens that are there already
    paged = PagedRows(chunks, Shapes(), dtype, heads_major=heads_major)
    q = np.random.default_rng(2).normal(size=(num_tiles * tile, H, D)).astype(dtype)
    positions, tables = np.zeros(num_tiles * tile, np.int32), np.zeros((num_tiles, paged.tables.shape[1]), np.int32)
    starts, rows = np.arange(num_tiles, dtype=np.int32) * tile, np.zeros(num_tiles, np.int32)
    real, at = np.zeros(num_tiles * tile, bool), 0
    for number, count in enumerate(counts):
        owned = slice(at // tile, at // tile - (-count // tile))
        positions[at : at + count], real[at : at + count] = np.arange(3, 3 + count), True
        tables[owned], rows[owned.start] = paged.tables[number], count
        at = owned.stop * tile
    kv = stored(paged.kv.at[:, 0].set(0))  # padding attends to the null page: finite in a pool
    options = {"scale": 0.3, "window": None, "heads_major": heads_major, "dtype": dtype}
    single = jax.jit(partial(ref.attend, **options))(q, kv, np.int32(LAYER), tables, positions)
    joined = jax.jit(partial(ref.attend_tiles, **options))(q, kv, np.int32(LAYER), tables, positions, Rows(starts, rows, rows))
    atol = 2e-5 if dtype == np.float32 else 3e-2
    got, wanted = np.asarray(joined, np.float64)[real], np.asarray(single, np.float64)[real]
    np.testing.assert_allclose(got, wanted, atol=atol)


@pytest.mark.kernels
@pytest.mark.parametrize(("counts", "joined"), [({0: 32}, True), ({0: 16, 16: 9}, True), ({0: 20, 20: 9}, False)])
def test_tiles_are_joined_when_no_row_begins_within_a_joined_one(counts, joined, monkeypatch):
    monkeypatch.setattr(ref, "WIDE_TILE", 16)
    paged = PagedRows([(1, 32)], Shapes(), np.float32)
    tables = np.tile(paged.tables[0], (8, 1))
    tables[1::4] = 0  # a second tile's table is read only when tiles are not joined, and leads to NaN
    starts, rows = np.arange(8, dtype=np.int32) * 4, np.zeros(8, np.int32)
    for start, count in counts.items():
        rows[start // 4] = count
    kernel = jax.jit(partial(ref.attend_tiles, scale=0.3, window=None, heads_major=True, dtype=np.float32))
    out = kernel(np.ones((32, H, D), np.float32), paged.kv, np.int32(LAYER), tables, np.arange(32), Rows(starts, rows, rows))
    assert bool(np.isfinite(np.asarray(out)).all()) == joined
