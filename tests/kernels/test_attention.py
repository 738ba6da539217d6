"""Ragged paged attention, every implementation, against NumPy in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gpu_kit.paged_rows import LAYER, PagedRows, Shapes
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention import attend
from pallas_kernels.rows import Kind, Rows
from tests.kernels.pages import FixedBlocks

# (queries, tokens): one token, page edges (pages of 4), block edges, chunks in the middle of a prompt, empty rows.
RAGGED = [(1, 1), (1, 4), (1, 5), (0, 3), (4, 4), (5, 9), (3, 17), (0, 1), (1, 16), (7, 8), (0, 2)]
DECODE = [(1, 17), (1, 1), (0, 4), (1, 8), (1, 9)]
PREFILL = [(9, 9), (0, 3), (8, 17), (1, 5)]
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "int8": 2e-5}
SHAPES = {
    "gqa": Shapes(),
    "mha": Shapes(kv_heads=3, group=1),
    "mqa": Shapes(kv_heads=1, group=6),
    "wide": Shapes(kv_heads=1, group=8, dim=128),  # halves of whole registers are cut apart
}
CASES = [  # (kind, rows, shapes, dtype, window), of every kernel
    (Kind.MIXED, RAGGED, "gqa", np.float32, None),
    (Kind.DECODE, DECODE, "gqa", np.int8, None),
    (Kind.DECODE, DECODE, "mha", np.float32, 1),
    (Kind.DECODE, DECODE, "mqa", ml_dtypes.bfloat16, 5),
    (Kind.DECODE, DECODE, "wide", ml_dtypes.bfloat16, None),
    (Kind.PREFILL, PREFILL, "gqa", np.int8, 5),
    (Kind.PREFILL, PREFILL, "mha", ml_dtypes.bfloat16, None),
    (Kind.PREFILL, PREFILL, "wide", np.float32, 4),
]


def run(paged, *, window=None, blocks=FixedBlocks(4, 2), **options):
    kernel = partial(
        attend, scale=0.3, window=window, heads_major=paged.heads_major, table=blocks, scales=paged.scales, **options
    )
    out = jax.jit(kernel)(paged.q, paged.kv, LAYER, paged.tables, paged.rows)
    return np.asarray(out, np.float64), paged.wanted(scale=0.3, window=window)


@pytest.mark.parametrize(("heads_major", "window"), [(True, 5), (False, None)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
def test_ref_serves_ragged_rows_of_every_kind(heads_major, window, dtype):
    paged = PagedRows(RAGGED, SHAPES["gqa"], dtype, heads_major=heads_major, gap=1)
    out, wanted = run(paged, window=window)
    np.testing.assert_allclose(out, wanted, atol=TOLERANCE[np.dtype(dtype).name])


@pytest.mark.parametrize(("kind", "rows", "shapes", "dtype", "window"), CASES)
def test_the_tpu_kernel_equals_dense_attention_and_ignores_nan(kind, rows, shapes, dtype, window):
    paged = PagedRows(rows, SHAPES[shapes], dtype, gap=1)
    out, wanted = run(paged, window=window, kind=kind, implementation="tpu", interpret=pltpu.InterpretParams())
    np.testing.assert_allclose(out, wanted, atol=TOLERANCE[np.dtype(dtype).name] if shapes != "wide" else 3e-2)


@pytest.mark.parametrize(
    ("kind", "rows", "dtype", "window"),
    [
        (Kind.DECODE, DECODE, np.float32, None),
        (Kind.PREFILL, PREFILL, np.float32, 5),
        (Kind.DECODE, DECODE, np.int8, 5),
    ],
)
def test_copies_have_landed_before_they_are_read_and_nobody_races(kind, rows, dtype, window, capfd):
    paged = PagedRows(rows, SHAPES["gqa"], dtype)
    interpret = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait")
    out, wanted = run(paged, window=window, kind=kind, implementation="tpu", interpret=interpret)
    np.testing.assert_allclose(out, wanted, atol=TOLERANCE[np.dtype(dtype).name])
    assert "race" not in capfd.readouterr().out.lower()


@pytest.mark.parametrize("blocks", [FixedBlocks(1, 1), FixedBlocks(2, 3), FixedBlocks(16, 8)])
def test_block_sizes_do_not_change_what_comes_out(blocks):
    paged = PagedRows([(6, 14), (3, 3)], SHAPES["gqa"], np.float32)
    out, wanted = run(paged, blocks=blocks, kind=Kind.PREFILL, implementation="tpu", interpret=pltpu.InterpretParams())
    np.testing.assert_allclose(out, wanted, atol=2e-5)


def test_blocks_by_rule_are_large_and_serve_a_mixed_batch():
    """Many pages to a block and many rows to a product: loops that tiny blocks write out are loops here."""
    shapes = Shapes(kv_heads=4, group=4, dim=64, page_size=16, num_pages=72)
    paged = PagedRows([(1, 600), (40, 300), (3, 17), (1, 31)], shapes, ml_dtypes.bfloat16, gap=1)
    out, wanted = run(paged, blocks=None, implementation="tpu", interpret=pltpu.InterpretParams())
    np.testing.assert_allclose(out, wanted, atol=3e-2)


def test_a_decoding_row_has_the_same_bits_beside_others_and_alone():
    together = PagedRows(DECODE, SHAPES["gqa"], ml_dtypes.bfloat16)
    alone = PagedRows(DECODE, SHAPES["gqa"], ml_dtypes.bfloat16)
    alone.rows = Rows(alone.rows.starts, alone.rows.counts * (np.arange(len(DECODE)) == 3), alone.rows.lengths)
    options = {"kind": Kind.DECODE, "implementation": "tpu", "interpret": pltpu.InterpretParams()}
    at = together.rows.starts[3]
    (both, _), (one, _) = run(together, **options), run(alone, **options)
    assert both[at].std() > 0.1
    np.testing.assert_array_equal(both[at], one[at])
    assert not one[at - 1].any()


def test_a_batch_without_any_row_is_all_zeros():
    paged = PagedRows([(0, 3), (0, 4)], SHAPES["gqa"], np.float32, gap=2)
    for implementation, interpret in (("ref", False), ("tpu", pltpu.InterpretParams())):
        out, _ = run(paged, implementation=implementation, kind=Kind.PREFILL, interpret=interpret)
        assert out.shape[0] == 6
        assert not out.any()


def test_page_tables_may_hold_rubbish_where_no_row_looks():
    paged = PagedRows([(1, 5), (1, 8)], SHAPES["gqa"], np.float32)
    paged.tables = np.concatenate([paged.tables, np.array([[2**30], [-7]], np.int32)], axis=1)
    out, wanted = run(paged, kind=Kind.DECODE, implementation="tpu", interpret=pltpu.InterpretParams())
    np.testing.assert_allclose(out, wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("shape", "dtype", "heads_major", "said"),
    [
        ((2, 8, 4, 2, 128), jnp.float32, False, "heads-major"),
        ((2, 8, 2, 8, 128), jnp.bfloat16, True, "multiple of 16"),
        ((2, 8, 2, 32, 128), jnp.int8, True, "multiple of 128"),
        ((2, 8, 2, 16, 64), jnp.bfloat16, True, "multiple of 64"),
        ((2, 8, 2, 16, 256), jnp.bfloat16, True, "twice as many"),
        ((2, 8, 2, 16, 128), jnp.float16, True, "float16"),
    ],
)
def test_what_the_tpu_kernel_cannot_do_is_refused_with_a_reason(shape, dtype, heads_major, said):
    q = jnp.zeros((3, 4, 32 if said == "multiple of 64" else 64), jnp.bfloat16)
    one = jnp.ones(3, jnp.int32)
    with pytest.raises(ValueError, match=said):
        attend(
            q, jnp.zeros(shape, dtype), 0, jnp.zeros((3, 2), jnp.int32), Rows(jnp.arange(3), one, one),
            scale=1.0, window=None, heads_major=heads_major, implementation="tpu",
        )  # fmt: skip


def test_a_table_that_does_not_fit_the_scalar_memory_is_refused():
    q, kv = jnp.zeros((3, 4, 64), jnp.bfloat16), jnp.zeros((2, 8, 2, 16, 128), jnp.bfloat16)
    tables = jax.ShapeDtypeStruct((3, 2**16 + 1), jnp.int32)
    one = jnp.ones(3, jnp.int32)
    options = {"scale": 1.0, "window": None, "heads_major": True, "implementation": "tpu"}
    with pytest.raises(ValueError, match=r"65537 entries.*--page-size"):
        jax.eval_shape(partial(attend, **options), q, kv, 0, tables, Rows(one, one, one))
