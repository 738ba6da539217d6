"""The GPU attention kernel, interpreted, against NumPy in float64; its planted faults; what it refuses."""

from dataclasses import replace
from itertools import cycle
from unittest.mock import patch

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gpu_kit.paged_rows import PagedRows

from pallas_kernels import gpu_attention, gpu_triton
from pallas_kernels.attention import attend
from pallas_kernels.gpu_attention import gpu_refuses
from pallas_kernels.rows import Kind, Rows
from pallas_kernels.work import visible
from tests.kernels.pages import FixedGpuBlocks
from tests.kernels.test_attention import CASES, DECODE, PREFILL, RAGGED, SHAPES, TOLERANCE, run

WINDOWED = (Kind.MIXED, RAGGED, "mqa", ml_dtypes.bfloat16, 5)


def attended(paged, splits=1, *, window=None, rule=None, **options):
    with patch.object(gpu_attention, "gpu_blocks_by_rule", rule or FixedGpuBlocks(splits)):
        return run(paged, window=window, blocks=None, implementation="gpu", interpret=True, **options)


@pytest.mark.parametrize(("case", "splits"), list(zip([*CASES, WINDOWED], cycle((3, 1)), strict=False)))
def test_the_gpu_kernel_equals_dense_attention_and_ignores_nan(case, splits):
    kind, rows, shapes, dtype, window = case
    paged = PagedRows(rows, SHAPES[shapes], dtype, heads_major=False, gap=1)
    out, wanted = attended(paged, splits, window=window, kind=kind)
    np.testing.assert_allclose(out, wanted, atol=TOLERANCE[np.dtype(dtype).name] if shapes != "wide" else 3e-2)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.int8])
def test_the_rule_s_own_blocks_serve_real_head_dimensions(dim, dtype):
    shapes = replace(SHAPES["gqa"], dim=dim, page_size=16, kv_heads=1, group=4)
    paged = PagedRows([(1, 70), (5, 40), (0, 2), (1, 16)], shapes, dtype, heads_major=False)
    out, wanted = run(paged, window=33, blocks=None, implementation="gpu", interpret=True)
    assert wanted.std() > 0.05
    np.testing.assert_allclose(out, wanted, atol=3e-2 if dtype != np.int8 else 2e-3)


@pytest.mark.parametrize("rule", [FixedGpuBlocks(2, 16, 32), FixedGpuBlocks(1, 32, 16), FixedGpuBlocks(9, 64, 16)])
def test_block_sizes_do_not_change_what_comes_out(rule):
    paged = PagedRows([(6, 38), (3, 3)], SHAPES["gqa"], np.float32, heads_major=False)
    out, wanted = attended(paged, rule=rule, kind=Kind.PREFILL)
    np.testing.assert_allclose(out, wanted, atol=2e-5)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("splits", [1, 2])
def test_a_batch_without_any_row_is_all_zeros(kind, splits):
    paged = PagedRows([(0, 3), (0, 4)], SHAPES["gqa"], np.float32, heads_major=False, gap=2)
    out, _ = attended(paged, splits, kind=kind)
    assert out.shape[0] == 6
    assert not out.any()


def test_page_tables_may_hold_rubbish_where_no_row_looks():
    paged = PagedRows([(1, 5), (1, 8)], SHAPES["gqa"], np.float32, heads_major=False)
    paged.tables = np.concatenate([paged.tables, np.array([[2**30], [-7]], np.int32)], axis=1)
    out, wanted = attended(paged, kind=Kind.DECODE)
    np.testing.assert_allclose(out, wanted, atol=2e-5)


def test_a_row_s_result_depends_neither_on_its_neighbours_nor_on_its_place():
    rows = [(1, 37), (1, 5), (1, 16), (1, 30)]
    paged = PagedRows(rows, SHAPES["gqa"], np.float32, heads_major=False)
    out, _ = attended(paged, 2, kind=Kind.DECODE)
    order = np.array([2, 3, 0, 1])
    paged.q, paged.tables = paged.q[order], paged.tables[order]
    lengths = np.asarray(paged.rows.lengths)[order] * np.array([1, 0, 1, 1])
    paged.rows = Rows(paged.rows.starts, (lengths > 0).astype(np.int32), lengths)
    moved, _ = attended(paged, 2, kind=Kind.DECODE)
    np.testing.assert_array_equal(moved[[0, 2, 3]], out[[2, 0, 1]])
    assert not moved[1].any()


inside, entry, end = gpu_triton._inside, gpu_triton._entry, gpu_triton._end
FAULTS = {  # the function of the kernel that is replaced, and by what
    "next page": ("_entry", lambda *of: jnp.minimum(entry(*of) + 1, 4)),
    "page before": ("_entry", lambda *of: jnp.maximum(entry(*of) - 1, 0)),
    "values of masked keys": ("_inside", lambda *of: jnp.ones_like(inside(*of))),
    "one key too few is read": ("_inside", lambda *of: inside(*of) & jnp.roll(inside(*of), -1)),
    "sees one key too many": ("visible", lambda distance, window: visible(distance + 1, window and window + 1)),
    "window too wide": ("visible", lambda distance, window: visible(distance, window and window + 1)),
    "window too narrow": ("visible", lambda distance, window: visible(distance, window and window - 1)),
    "splits overlap": ("_end", lambda *of: end(*of) + 1),
    "splits leave a gap": ("_end", lambda *of: end(*of) - 1),
}


@pytest.mark.parametrize(("kind", "rows"), [(Kind.DECODE, DECODE), (Kind.PREFILL, PREFILL)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, kind, rows, monkeypatch):
    monkeypatch.setattr(gpu_triton, *FAULTS[fault])
    window = None if fault.startswith("splits") else 5
    paged = PagedRows(rows, SHAPES["gqa"], np.float32, heads_major=False)
    out, wanted = attended(paged, 2, window=window, kind=kind)
    assert not np.allclose(out, wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "said"),
    [
        ((2, 8, 4, 2, 128), jnp.float32, {"heads_major": True}, "tokens-major"),
        ((2, 8, 16, 2, 256), jnp.bfloat16, {}, "twice as many"),
        ((2, 8, 16, 2, 128), jnp.float16, {}, "float16"),
        ((2, 8, 16, 1, 128), jnp.bfloat16, {"heads": 256}, "at most 128"),
        ((32, 2**22, 16, 1, 128), jnp.bfloat16, {}, "set --num-pages"),
        ((8, 2**16, 16, 2, 128), jnp.int8, {"dtype": jnp.bfloat16}, None),
        ((8, 2**16, 16, 3, 128), jnp.int8, {"dtype": jnp.bfloat16}, "2 to 4 GiB"),
        ((8, 2**16, 16, 5, 128), jnp.int8, {"dtype": jnp.bfloat16}, None),
        ((8, 2**20, 16, 8, 256), jnp.bfloat16, {}, None),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_with_a_reason(shape, dtype, options, said):
    q = jax.ShapeDtypeStruct((3, options.get("heads", shape[3] * 4), 64 if said else shape[4] // 2), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct(shape, dtype)
    reason = gpu_refuses(q, kv, dtype=jnp.dtype(options.get("dtype", dtype)), heads_major=options.get("heads_major", False))
    assert (reason is None) if said is None else (said in reason)


def test_the_reason_reaches_who_calls():
    paged = PagedRows([(1, 3)], SHAPES["gqa"], np.float32)
    with pytest.raises(ValueError, match="paged attention for GPU: pages are"):
        attend(
            paged.q, paged.kv, 0, jnp.asarray(paged.tables), paged.rows,
            scale=1.0, window=None, heads_major=True, implementation="gpu",
        )  # fmt: skip
