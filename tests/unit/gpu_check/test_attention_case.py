"""The reference that kernels are judged by, against sums a reader can do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from gpu_kit.attention_case import CASES, LAYER, PAGE_SIZE, Arrays, Case


def test_a_query_that_sees_one_token_gets_its_value() -> None:
    arrays = Arrays(Case(name="", rows=((1, 1),), num_heads=4, num_kv_heads=2, head_dim=8))
    page = arrays.page_tables[0, 0]
    values = arrays.stored[LAYER, page, 0, :, 8:]
    assert np.array_equal(arrays.answer()[0], np.repeat(values, 2, axis=0).astype(np.float64))


def test_equal_keys_give_the_mean_of_the_values_in_the_window() -> None:
    arrays = Arrays(Case(name="", rows=((1, PAGE_SIZE + 3),), num_heads=2, num_kv_heads=2, head_dim=4, window=5))
    arrays.stored[..., :4] = 1.0
    tokens = np.arange(PAGE_SIZE - 2, PAGE_SIZE + 3)
    seen = arrays.stored[LAYER, arrays.page_tables[0, tokens // PAGE_SIZE], tokens % PAGE_SIZE, :, 4:]
    assert np.allclose(arrays.answer()[0], seen.astype(np.float64).mean(axis=0), atol=1e-12)


def test_every_case_has_its_unused_cells_poisoned_and_a_finite_answer() -> None:
    for case in CASES:
        arrays = Arrays(case)
        unused = arrays.stored[:, ~arrays.cells]
        assert unused.size
        poisoned = (unused == 127) if case.kv_dtype == "int8" else np.isnan(unused.astype(np.float32))
        assert poisoned.all(), case.name
        assert np.isfinite(arrays.answer()).all(), case.name
        assert arrays.positions.shape == arrays.owners.shape == arrays.q.shape[:1]


def test_bfloat16_cases_ask_with_what_bfloat16_can_say() -> None:
    arrays = Arrays(next(case for case in CASES if case.kv_dtype == "bfloat16"))
    assert np.array_equal(arrays.q, arrays.q.astype(ml_dtypes.bfloat16).astype(np.float32))
