"""The reference that kernels are judged by, here and on a GPU, against sums a reader can do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from gpu_kit.attention_case import CASES, Case
from gpu_kit.paged_rows import LAYER, PagedRows, Shapes


def test_a_query_that_sees_one_token_gets_its_value() -> None:
    paged = PagedRows([(1, 1)], Shapes(kv_heads=2, group=2, dim=8), np.float32)
    value = paged.content[0][0, :, 8:]
    assert np.array_equal(paged.wanted(scale=0.3, window=None)[0], np.repeat(value, 2, axis=0))


def test_equal_keys_give_the_mean_of_the_values_in_the_window() -> None:
    paged = PagedRows([(2, 19)], Shapes(kv_heads=2, group=1, dim=4), np.float32)
    paged.content[0][..., :4] = 1.0
    values = paged.content[0][..., 4:]
    for query, end in enumerate((18, 19)):
        assert np.allclose(paged.wanted(scale=0.3, window=5)[query], values[end - 5 : end].mean(axis=0), atol=1e-12)
        assert np.allclose(paged.wanted(scale=0.3, window=None)[query], values[:end].mean(axis=0), atol=1e-12)


def test_a_key_outweighs_others_by_what_its_product_with_the_query_is_more() -> None:
    paged = PagedRows([(1, 2)], Shapes(kv_heads=1, group=2, dim=2), np.float32)
    paged.q[0] = [[2.0, 0.0], [0.0, 0.0]]
    paged.content[0][:, 0, :2] = [[1.0, 7.0], [0.0, 7.0]]
    first, second = paged.content[0][:, 0, 2:]
    e = np.exp(0.5 * 2.0)
    wanted = [(e * first + second) / (e + 1), (first + second) / 2]
    assert np.allclose(paged.wanted(scale=0.5, window=None)[0], wanted, atol=1e-12)


@pytest.mark.parametrize("heads_major", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_has_its_unused_cells_poisoned_and_a_finite_answer(case: Case, heads_major: bool) -> None:
    paged = case.arrays(heads_major=heads_major)
    pool = np.asarray(paged.kv).swapaxes(2, 3) if heads_major else np.asarray(paged.kv)
    used = np.zeros(pool.shape[1:3], bool)
    for content, table in zip(paged.content, paged.tables, strict=True):
        at = np.arange(len(content))
        cells = table[at // pool.shape[2]], at % pool.shape[2]
        used[cells] = True
        if paged.scales is None:
            assert np.array_equal(pool[LAYER][cells].astype(np.float64), content)
    assert used.sum() == sum(tokens for _, tokens in case.rows), "each has a cell of its own"
    unused = pool[:, ~used]
    assert unused.size
    assert ((unused == 77) if case.kv_dtype == "int8" else np.isnan(unused.astype(np.float32))).all()
    assert np.isfinite(paged.wanted(scale=1.0, window=case.window)).all()


def test_integers_stand_for_what_their_scales_make_of_them() -> None:
    case = next(case for case in CASES if case.kv_dtype == "int8")
    paged = case.arrays(heads_major=False)
    assert paged.scales is not None
    cell = LAYER, paged.tables[0, 0], 0
    halves = np.asarray(paged.kv)[cell].astype(np.float64).reshape(case.num_kv_heads, 2, case.head_dim)
    meant = halves * np.asarray(paged.scales)[cell][..., None]
    assert np.array_equal(paged.content[0][0], meant.reshape(case.num_kv_heads, -1))


def test_bfloat16_cases_ask_with_what_bfloat16_can_say() -> None:
    for case in CASES:
        query_dtype = np.float32 if case.kv_dtype == "float32" else ml_dtypes.bfloat16
        assert case.arrays(heads_major=True).q.dtype == query_dtype
